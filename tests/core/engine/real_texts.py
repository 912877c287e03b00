"""Twenty texts: three articles of the Universal Declaration of Human Rights in six languages, and
two pieces of code."""

TEXTS = {
    "english 1": "All human beings are born free and equal in dignity and rights. They are endowed "
    "with reason and conscience and should act towards one another in a spirit of brotherhood.",
    "english 18": "Everyone has the right to freedom of thought, conscience and religion; this "
    "right includes freedom to change his religion or belief, and freedom, either alone or in "
    "community with others and in public or private, to manifest his religion or belief in "
    "teaching, practice, worship and observance.",
    "english 24": "Everyone has the right to rest and leisure, including reasonable limitation of "
    "working hours and periodic holidays with pay.",
    "french 1": "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont "
    "doués de raison et de conscience et doivent agir les uns envers les autres dans un esprit de "
    "fraternité.",
    "french 18": "Toute personne a droit à la liberté de pensée, de conscience et de religion ; ce "
    "droit implique la liberté de changer de religion ou de conviction ainsi que la liberté de "
    "manifester sa religion ou sa conviction seule ou en commun, tant en public qu'en privé, par "
    "l'enseignement, les pratiques, le culte et l'accomplissement des rites.",
    "french 24": "Toute personne a droit au repos et aux loisirs et notamment à une limitation "
    "raisonnable de la durée du travail et à des congés payés périodiques.",
    "german 1": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit "
    "Vernunft und Gewissen begabt und sollen einander im Geist der Brüderlichkeit begegnen.",
    "german 18": "Jeder hat das Recht auf Gedanken-, Gewissens- und Religionsfreiheit; dieses "
    "Recht schließt die Freiheit ein, seine Religion oder Überzeugung zu wechseln, sowie die "
    "Freiheit, seine Religion oder Weltanschauung allein oder in Gemeinschaft mit anderen, "
    "öffentlich oder privat durch Lehre, Ausübung, Gottesdienst und Kulthandlungen zu bekennen.",
    "german 24": "Jeder hat das Recht auf Erholung und Freizeit und insbesondere auf eine "
    "vernünftige Begrenzung der Arbeitszeit und regelmäßigen bezahlten Urlaub.",
    "spanish 1": "Todos los seres humanos nacen libres e iguales en dignidad y derechos y, dotados "
    "como están de razón y conciencia, deben comportarse fraternalmente los unos con los otros.",
    "spanish 18": "Toda persona tiene derecho a la libertad de pensamiento, de conciencia y de "
    "religión; este derecho incluye la libertad de cambiar de religión o de creencia, así como la "
    "libertad de manifestar su religión o su creencia, individual y colectivamente, tanto en "
    "público como en privado, por la enseñanza, la práctica, el culto y la observancia.",
    "spanish 24": "Toda persona tiene derecho al descanso, al disfrute del tiempo libre, a una "
    "limitación razonable de la duración del trabajo y a vacaciones periódicas pagadas.",
    "russian 1": "Все люди рождаются свободными и равными в своем достоинстве и правах. Они "
    "наделены разумом и совестью и должны поступать в отношении друг друга в духе братства.",
    "russian 18": "Каждый человек имеет право на свободу мысли, совести и религии; это право "
    "включает свободу менять свою религию или убеждения и свободу исповедовать свою религию или "
    "убеждения как единолично, так и сообща с другими, публичным или частным порядком.",
    "russian 24": "Каждый человек имеет право на отдых и досуг, включая право на разумное "
    "ограничение рабочего дня и на оплачиваемый периодический отпуск.",
    "chinese 1": "人人生而自由,在尊严和权利上一律平等。"
    "他们赋有理性和良心,并应以兄弟关系的精神相对待。",
    "chinese 18": "人人有思想、良心和宗教自由的权利;此项权利包括改变他的宗教或信仰的自由,"
    "以及单独或集体、"
    "公开或秘密地以教义、实践、礼拜和戒律表示他的宗教或信仰的自由。",
    "chinese 24": "人人有享有休息和闲暇的权利,包括工作时间有合理限制和定期给薪休假的权利。",
    "python": "def fibonacci(n: int) -> int:\n    a, b = 0, 1\n    for _ in range(n):\n"
    "        a, b = b, a + b\n    return a\n\n\nassert [fibonacci(n) for n in range(10)] == "
    "[0, 1, 1, 2, 3, 5, 8, 13, 21, 34]\n",
    "c": "#include <stdio.h>\n\nint main(void) {\n    for (int i = 1; i <= 100; i++) {\n"
    '        if (i % 15 == 0) puts("FizzBuzz");\n        else if (i % 3 == 0) puts("Fizz");\n'
    '        else if (i % 5 == 0) puts("Buzz");\n        else printf("%d\\n", i);\n    }\n}\n',
}
