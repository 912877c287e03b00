"""Personal data and keys: what is planted is found, and what only looks alike stays."""

import base64
import ipaddress
import json
import random
import string
from collections.abc import Callable

import pytest

pytest.importorskip("phonenumbers")

import phonenumbers

from nmoe_core.base.errors import ConfigError
from nmoe_core.text.transforms.personal.patterns import is_card
from tests.core.text.transforms.applied import applied, batch_of, chain_of, one
from tests.growth import growth
from tests.project import REPOSITORY

_WORD = string.ascii_letters + string.digits
_URL_SAFE = _WORD + "-_"


def _drawn(rng: random.Random, alphabet: str, count: int) -> str:
    return "".join(rng.choices(alphabet, k=count))


def _email(rng: random.Random) -> str:
    name = _drawn(rng, string.ascii_lowercase, 6)
    return (
        f"{name}.{name[::-1]}@{_drawn(rng, string.ascii_lowercase, 7)}.{rng.choice(['org', 'de'])}"
    )


def _ip(rng: random.Random) -> str:
    return str(ipaddress.IPv4Address(0x5D_C8_00_00 + rng.getrandbits(16)))


def _iban(rng: random.Random) -> str:
    account = _drawn(rng, string.digits, 18)
    check = 98 - int(account + "131400") % 97
    number = f"DE{check:02}{account}"
    return number if rng.random() < 0.5 else " ".join(number[i : i + 4] for i in range(0, 22, 4))


def _card(rng: random.Random) -> str:
    while True:
        digits = "4" + _drawn(rng, string.digits, 15)
        if is_card(digits):
            break
    return digits if rng.random() < 0.5 else " ".join(digits[i : i + 4] for i in range(0, 16, 4))


def _phone(rng: random.Random) -> str:
    """A valid number of one of some countries, with its code, or as Americans write it."""
    while True:
        code, length = rng.choice([(1, 10), (49, 10), (44, 10), (33, 9)])
        number = phonenumbers.parse(f"+{code}{_drawn(rng, string.digits, length)}")
        if phonenumbers.is_valid_number(number):
            break
    form = phonenumbers.PhoneNumberFormat
    forms = [form.E164, form.INTERNATIONAL] + [form.NATIONAL] * (code == 1)
    return phonenumbers.format_number(number, rng.choice(forms))


def _web_token(rng: random.Random) -> str:
    parts = ({"alg": "HS256", "typ": "JWT"}, {"sub": _drawn(rng, _WORD, 9)})
    encoded = (base64.urlsafe_b64encode(json.dumps(one).encode()).decode() for one in parts)
    return ".".join([*(one.rstrip("=") for one in encoded), _drawn(rng, _URL_SAFE, 43)])


def _block(rng: random.Random) -> str:
    lines = [_drawn(rng, _WORD + "+/", 64) for _ in range(9)]
    return "\n".join(["-----BEGIN RSA PRIVATE KEY-----", *lines, "-----END RSA PRIVATE KEY-----"])


_BASE32 = string.ascii_uppercase + "234567"
KEYS: dict[str, Callable[[random.Random], str]] = {
    "AWS": lambda rng: "AKIA" + _drawn(rng, _BASE32, 16),
    "GitHub": lambda rng: f"ghp_{_drawn(rng, _WORD, 36)}",
    "GitHub, fine-grained": lambda rng: (
        f"github_pat_{_drawn(rng, _WORD, 22)}_{_drawn(rng, _WORD, 59)}"
    ),
    "GitLab": lambda rng: f"glpat-{_drawn(rng, _URL_SAFE, 19)}x",
    "Slack": lambda rng: f"xoxb-{_drawn(rng, string.digits, 12)}-{_drawn(rng, _WORD, 24)}",
    "Stripe": lambda rng: f"sk_live_{_drawn(rng, _WORD, 24)}",
    "OpenAI": lambda rng: f"sk-proj-{_drawn(rng, _WORD, 74)}T3BlbkFJ{_drawn(rng, _WORD, 74)}",
    "Anthropic": lambda rng: f"sk-ant-api03-{_drawn(rng, _URL_SAFE, 93)}AA",
    "Google": lambda rng: f"AIza{_drawn(rng, _URL_SAFE, 34)}x",
    "npm": lambda rng: f"npm_{_drawn(rng, _WORD, 36)}",
    "PyPI": lambda rng: f"pypi-AgEIcHlwaS5vcmc{_drawn(rng, _WORD, 120)}",
    "Hugging Face": lambda rng: f"hf_{_drawn(rng, string.ascii_letters, 34)}",
    "JSON Web Token": _web_token,
    "PEM": _block,
}
PERSONAL: dict[str, Callable[[random.Random], str]] = {
    "email": _email,
    "phone": _phone,
    "ip": _ip,
    "iban": _iban,
    "card": _card,
}


def real_texts() -> list[str]:
    """Paragraphs of this repository's documents."""
    files = sorted(REPOSITORY.glob("docs/*.md"))
    return [part for path in files for part in path.read_text("utf-8").split("\n\n")][::9][:80]


@pytest.mark.parametrize("name", [*PERSONAL, *KEYS])
def test_what_is_planted_into_real_texts_is_found_and_nothing_else(name: str) -> None:
    rng = random.Random(name)
    chain = chain_of("redact")
    plain = applied(chain, real_texts())
    make = PERSONAL.get(name) or KEYS[name]
    secrets = [make(rng) for _ in plain]
    kind = name if name in PERSONAL else "key"
    planted = [
        f"{text} ({secret}), {rng.choice(['or', 'and'])}" for text, secret in zip(plain, secrets)
    ]
    after = applied(chain, planted)
    found = sum(f"(<{kind.upper()}>)" in text for text in after)
    assert found >= 0.99 * len(planted)
    gone = [text.replace(f"(<{kind.upper()}>)", "") for text in after]
    expected = [text.replace(f"({secret})", "") for text, secret in zip(planted, secrets)]
    wrong = [i for i, text in enumerate(gone) if text != expected[i] and secrets[i] not in text]
    assert wrong == []


@pytest.mark.parametrize("regions", [(), ("US",), ("DE",)])
@pytest.mark.parametrize(
    ("number", "region"),
    [
        *(("+49 30 1234567", ""), ("+33123456789", ""), ("+44 (0)20 7946 0958", "")),
        *(("(415) 555-2671", "US"), ("415.555.2671", "US"), ("1-800-555-0199", "US")),
        *(("030/123 45 67", "DE"), ("0171 2345678", "DE"), ("Tel. 0301234567", "DE")),
    ],
)
def test_numbers_without_a_country_code_belong_to_the_regions(
    number: str, region: str, regions: tuple[str, ...]
) -> None:
    after = one(chain_of("redact", regions=regions), f"Call us at {number}, please")
    is_found = not region or region in regions
    assert ("<PHONE>" in after) == is_found


_NEITHER = (
    *(
        "2024-01-15 10:30:00",
        "0.290335 -> 0.299541",
        "12 34 56 78 90",
        "415 555 2671 312 415",
        "DFARS 252.227-7014",
    ),
    *("ISBN 978-3-16-148410-0", "0123456789", "v1.2.3.4", "section 8.2.4.44", "base-4.10.1.0"),
    *("10.0.0.1", "127.0.0.1", "192.0.2.17", "8.8.8.8"),
    *("0.4532015112830366", "id=4532015112830366", "3.4532015112830366e5", "1234 5678 9012 3456"),
    *("GB82 WEST 1234 5698 7654 31", "git@github.com:a/b.git", "logo@2x.png", "a @ b"),
    *("ghp_" + "x" * 36, "AKIA" + "A" * 16, "sk-learn-is-a-package", "hf_hub_download"),
    *('password = "correct-horse-battery"', "token = getTokenFromRequest", 'secret: "changeme"'),
    *('api_key = "YOUR_API_KEY_GOES_HERE"', "password = os.environ['DATABASE_PASSWORD']"),
    *('token_url = "https://login.host.io/oauth2/v1/token"', "MySuperSecretPassword1"),
    *("4539 148803 436467", "ghp_aB3dE5fG7hJxxxxK9mN1pQ3rS5tU7vW9xY1zA4c", "30-1234-567"),
    *('password = "correcthorsebattery9"', 'secret = "MySuperSecretPasswordOfMine9"'),
    *("-----BEGIN PRIVATE KEY-----\n...\n-----END PRIVATE KEY-----", "eyJhbGciOi.eyJ.x"),
)


@pytest.mark.parametrize("text", _NEITHER)
def test_what_looks_alike_stays(text: str) -> None:
    assert one(chain_of("redact", regions=("US", "DE")), f"See {text}") == f"See {text}"


_EXAMPLES = (
    *("me@example.com", "me@mail.example.org", "root@host.test", "AKIAIOSFODNN7EXAMPLE"),
    *('api_key = "a1B2c3D4EXAMPLE5f6G7h8"', "4111 1111 1111 1111"),
    "4242424242424242",
)


@pytest.mark.parametrize("text", _EXAMPLES)
def test_examples_of_manuals_stay_unless_they_are_asked_for(text: str) -> None:
    assert one(chain_of("redact"), text) == text
    assert "<" in one(chain_of("redact", keep_examples=False), text)


@pytest.mark.parametrize("name", ["password", "DB_PASSWD", "api_key", "client_secret", "authToken"])
@pytest.mark.parametrize("form", ['{} = "{}"', "{}: {}", '"{}": "{}"', "{}={}", "{} => '{}'"])
def test_a_random_value_of_a_secret_name_is_replaced_and_its_name_stays(
    name: str, form: str
) -> None:
    rng = random.Random(name + form)
    chain = chain_of("redact")
    values = [_drawn(rng, _WORD, 32) for _ in range(50)]
    texts = [form.format(name, value) for value in values]
    found = applied(chain, texts)
    assert sum(text == form.format(name, "<KEY>") for text in found) >= 48


def test_words_after_an_iban_are_not_part_of_it() -> None:
    assert one(chain_of("redact"), "BE68 5390 0754 7034 BIC") == "<IBAN> BIC"


def test_kinds_and_placeholder_are_as_configured() -> None:
    text = "jane@host.org from 93.184.216.34"
    assert one(chain_of("redact", kinds=("ip",)), text) == "jane@host.org from <IP>"
    assert one(chain_of("redact", placeholder="[{kind}]"), text) == "[email] from [ip]"
    assert one(chain_of("redact", placeholder=""), text) == "from"


def test_of_kinds_that_overlap_the_first_is_taken() -> None:
    key = "AKIA" + "B3CD5EF7GH2IJ4KL"
    assert one(chain_of("redact"), f"access_key = {key}@host.org") == "access_key = <KEY>@host.org"


def test_an_unknown_region_is_refused() -> None:
    with pytest.raises(ConfigError, match="XX"):
        chain_of("redact", regions=("XX",))


_UNITS = (
    *("a", "1", "1 ", "1.", "1-", "a@", "a@a.", "@", "+1", "(", "AKIA", "ghp_", "eyJa.", "sk-"),
    *("-----BEGIN PRIVATE KEY-----", "password=", "token: a", "A1", "AB12 ", "Tel. ", "0 "),
    *(
        "a@b.cc ",
        "93.184.216.34 ",
        "415-555-2671 ",
        "4111111111111112 ",
        "token = a1B2c3D4e5F6g7H8 ",
    ),
    *("+4930", "-----", "GB82", "2001:", "'", "é", "\U0001f600"),
)


@pytest.mark.parametrize("unit", _UNITS)
def test_time_follows_the_length_of_a_text(unit: str) -> None:
    chain = chain_of("redact", regions=("US", "DE"))

    def apply(text: str) -> object:
        return chain.apply(batch_of([text]))

    apply("a")
    small, large = (unit * (size // len(unit)) for size in (2**12, 2**15))
    assert growth(apply, small, large, 1e-3) < 24
