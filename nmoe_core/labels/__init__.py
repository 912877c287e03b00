"""Oracle labels: rubric, prompt, oracles, answers, label files and label noise."""
