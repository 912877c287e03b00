"""Notices at the start of code go, and what else stands there stays."""

import random

import pytest

from tests.core.text.transforms.applied import applied, batch_of, chain_of, one
from tests.growth import growth

_APACHE = """Copyright 2021 The Authors

Licensed under the Apache License, Version 2.0 (the "License");
you may not use this file except in compliance with the License.
You may obtain a copy of the License at

    http://www.apache.org/licenses/LICENSE-2.0

Unless required by applicable law or agreed to in writing, software
distributed under the License is distributed on an "AS IS" BASIS,
WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied."""
_MIT = """MIT License

Copyright (c) 2020 Jane Roe

Permission is hereby granted, free of charge, to any person obtaining a copy
of this software, to deal in the Software without restriction, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND."""
_GPL = """This file is part of Frob.

Copyright (C) 1999 Free Software, Inc.

Frob is free software; you can redistribute it and/or modify it under the terms of the
GNU General Public License as published by the Free Software Foundation.

You should have received a copy of the GNU General Public License along with Frob."""
_BSD = """(c) 2011 Jane Roe. All rights reserved.

Redistribution and use in source and binary forms are permitted provided that the following
conditions are met:

1. Redistributions of source code must retain the above copyright notice.

Neither the name of the author may be used to endorse products."""
_SHORT_BETWEEN = """Copyright 2014 Us

Licensed under the Apache License. A copy is located at

http://host.org/apache2.0/

or see the file LICENSE."""
_STYLES = {
    "#": lambda text: "\n".join(f"# {line}".rstrip() for line in text.splitlines()),
    "//": lambda text: "\n".join(f"// {line}".rstrip() for line in text.splitlines()),
    "--": lambda text: "\n".join(f"-- {line}".rstrip() for line in text.splitlines()),
    ";": lambda text: "\n".join(f";; {line}".rstrip() for line in text.splitlines()),
    "%": lambda text: "\n".join(f"% {line}".rstrip() for line in text.splitlines()),
    "/*": lambda text: "\n".join(
        ["/*", *(f" * {line}".rstrip() for line in text.splitlines()), " */"]
    ),
    "/**": lambda text: f"/** {text} **/",
    "<!--": lambda text: f"<!--\n{text}\n-->",
    '"""': lambda text: f'"""{text}\n"""',
}


@pytest.mark.parametrize("licence", [_APACHE, _MIT, _GPL, _BSD, _SHORT_BETWEEN, "@license MIT"])
@pytest.mark.parametrize("style", _STYLES)
def test_a_header_goes_as_a_whole_in_every_style(style: str, licence: str) -> None:
    code = "int x = 1;\n/* Copyright of this is ours, see LICENSE */"
    if "MIT License" in licence:
        licence = licence.partition("\n\n")[2]
    header = _STYLES[style](licence)
    if licence is _GPL:
        header = _STYLES[style](licence.partition("\n\n")[2])
    assert one(chain_of("licence_header"), f"{header}\n\n\n{code}") == code
    assert one(chain_of("licence_header"), f"#!/bin/x\n\n{header}\n{code}") == f"#!/bin/x\n\n{code}"


@pytest.mark.parametrize("style", ["#", "//", "--", "/*", "<!--"])
def test_a_description_around_a_licence_stays(style: str) -> None:
    parts = ["Frobnicates the widgets of a table.", _BSD, "It reads them one by one."]
    write = _STYLES[style]
    before = write("\n\n".join(parts))
    after = one(chain_of("licence_header"), f"{before}\ncode()")
    assert after == write("\n\n".join([parts[0], parts[2]])) + "\ncode()"


_KEPT = (
    "# Reads the licences of packages, and shows them.\nimport x",
    "// Plates are read from pictures of number plates (license plates).\nint x;",
    '"""Tests of copyrighted material."""\nx = 1',
    '"""Minimises, subject to the following constraints.\n\nOther values pass "as is"."""',
    "# Asks whether permission is granted; which one is governed by the table.\nx = 1",
    "#include <stdio.h>\n/* Copyright (c) 2001 by us, after code */\nint x;",
    "import x\n# Copyright (c) 2001 by us\n",
    "Copyright (c) 2001 by us, in prose that no comment marks.",
    "---\ntitle: a page\n---\nCopyright (c) 2001",
    "/* Copyright (c) 2001, a comment without end",
)


@pytest.mark.parametrize("text", _KEPT)
def test_what_is_no_notice_at_the_start_stays(text: str) -> None:
    assert one(chain_of("licence_header"), text) == text.strip()


def test_lines_of_spdx_stay_unless_they_are_to_go() -> None:
    text = "// SPDX-FileCopyrightText: 2024 Us\n// SPDX-License-Identifier: MIT\n\nint x;"
    kept = "// SPDX-License-Identifier: MIT\n\nint x;"
    assert one(chain_of("licence_header"), text) == kept
    assert one(chain_of("licence_header", keep_spdx=False), text) == "int x;"


def test_the_first_line_of_a_paragraph_with_terms_stays_if_it_is_about_the_file() -> None:
    text = "/* Declares tables.\n   Copyright (C) 2001 Us\n   Licensed under the GPL. */\nint x;"
    assert one(chain_of("licence_header"), text) == "/* Declares tables. */\nint x;"


def test_headers_planted_into_real_files_are_found_and_nothing_else() -> None:
    from tests.project import REPOSITORY

    rng = random.Random(0)
    files = sorted((REPOSITORY / "nmoe_core").rglob("*.py"))[:80]
    codes = [path.read_text("utf-8").strip() for path in files]
    chain = chain_of("licence_header")
    assert applied(chain, codes) == codes
    headers = [_STYLES["#"](rng.choice([_APACHE, _BSD])) for _ in codes]
    planted = [f"{header}\n\n{code}" for header, code in zip(headers, codes)]
    assert applied(chain, planted) == codes


@pytest.mark.parametrize(
    "unit",
    ["#", "# \n", "/*", "/**/", "// license\n", "//\n", '"""', "<!--", "copyright ", "-- a\n"],
)
def test_time_follows_the_length_of_a_text(unit: str) -> None:
    chain = chain_of("licence_header")
    small, large = (unit * (size // len(unit)) for size in (2**12, 2**15))
    assert growth(lambda text: chain.apply(batch_of([text])), small, large, 1e-3) < 24
