"""Settings of a run: each key once, with its type, its default and its valid values.

A field's type says how its value is read: `Path` is a local path, `str | Path` may also be a URL,
and relative paths start at the run's base. The text below a field is its help. Values with special
rules (`datasets`, `phases`, ...) are read by the modules of these names.
"""

import os
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

from loader.errors import ConfigError
from loader.files.addresses import local_path
from loader.order.policies import POLICIES
from loader.plan import tables
from loader.plan.packaged import FLOWS, MIXTURES, find_config
from loader.plan.phases import Phase, read_phases

_BUILD_THERE = "build the plan on the machine with the files, and give the plan's URL"
_ON_EXHAUST = ("error", "first_exhausted", "wrap")
CROPPED = "best_fit_cropped"
PACKINGS = ("concat", "best_fit", CROPPED, "twin")
TOKENIZER_FILES = "tokenizer.json", "tokenizer.model"
LOCAL_CACHE = "name a directory on this machine: the cache has local copies of files"


@dataclass(frozen=True, slots=True)
class Key:
    """Which values of a field are valid, and how the field is stored.

    positive: must be above 0; other numbers must be at least 0. high: largest number in a plan.
    choices: all valid values. in_plans: earlier names of choices, under which plan files store
    them. do: the remedy if a path is a URL. if_chosen: omitted from a plan's file if it has its
    default, so that plans that are older than the key keep their hash. folder: folder of the
    project and of the package with files that can be given by name. types, is_required: derived
    from the field.
    """

    positive: bool = False
    high: int | None = None
    choices: tuple[str, ...] = ()
    in_plans: Mapping[str, str] = field(default_factory=dict)
    do: str = ""
    if_chosen: bool = False
    folder: str = ""
    types: tuple[Any, ...] = ()
    is_required: bool = False


class Vocabulary(NamedTuple):
    """Properties of the tokenizer that all sources must share; None if not known yet."""

    tokenizer: str | None = None
    vocab_size: int | None = None
    eos_token_id: int | None = None


DEFAULT_TOKENIZER = "o200k_harmony"
DEFAULT_VOCAB_SIZE = 201_088
DEFAULT_EOS_TOKEN_ID = 199_999
"""For prep, and for data that record no tokenizer, such as another tool's directory without a
manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """Settings that decide the order of a stream."""

    seq_len: Annotated[int, Key(positive=True, high=2**24)]
    """Tokens per training sequence."""
    batch_size: Annotated[int, Key(positive=True, high=2**31)]
    """Sequences per step, over all ranks together."""
    seed: Annotated[int, Key(high=2**63 - 1)] = 42
    """Seed of the stream's order, of curation and of the topic model."""
    policy: Annotated[str, Key(choices=POLICIES)] = "swrr"
    """How the sources of a stage are interleaved."""
    window_stride: Annotated[str, Key(choices=("seq_len", "seq_len+1"))] = "seq_len"
    """Tokens between the starts of consecutive windows of a source: with `seq_len` each token is
    predicted once, with `seq_len+1` windows do not overlap."""
    on_exhaust: Annotated[str, Key(choices=_ON_EXHAUST, in_plans={"error": "all_exhausted"})] = (
        "all_exhausted"
    )
    """What happens if a source has too few tokens: `error` refuses the plan (plans call it
    `all_exhausted`), `first_exhausted` ends the run with the last window of any source, `wrap`
    starts the source again."""
    packing: Annotated[str, Key(choices=PACKINGS, if_chosen=True)] = "concat"
    """How documents fill windows: `concat` cuts a source every `window_stride` tokens, `best_fit`
    fills windows with whole documents and padding, `best_fit_cropped` with beginnings of documents
    and no padding, `twin` (made by `loader.twin`) cuts where another tokenizer's windows are
    cut."""
    shuffle: Annotated[bool, Key(if_chosen=True)] = False
    """Read a source's windows in a new random order each epoch."""
    shuffle_blocks: Annotated[bool, Key(if_chosen=True)] = False
    """Shuffle in blocks of 2^22 tokens: the blocks come in a random order, and so do the windows of
    each block."""
    max_epochs: Annotated[int, Key(high=2**31, if_chosen=True)] = 0
    """Maximum number of passes over a source that sets no `max_epochs` of its own. 0 means one
    pass, or no limit with `on_exhaust = "wrap"` or `policy = "epoch_weighted"`."""

    def of_stream(self) -> dict[str, Any]:
        """The values of the fields of this class, by name."""
        return {f.name: getattr(self, f.name) for f in fields(StreamSettings)}

    def epoch_limit(self, own: int) -> int:
        """Maximum number of passes over a source whose own `max_epochs` is `own`, or 0 if it sets
        none; 0 for no limit."""
        endless = self.on_exhaust == "wrap" or self.policy == "epoch_weighted"
        return own or self.max_epochs or (0 if endless else 1)

    @property
    def packs(self) -> bool:
        """Whether windows are packed with documents by best fit."""
        return self.packing in ("best_fit", CROPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings(StreamSettings):
    """All settings of a plan except its sources.

    If `tokenizer`, `vocab_size` or `eos_token_id` is None, its value is from the manifests;
    `phases` are changes of weights, in the order of their steps.
    """

    tokenizer: str | None = None
    """A tiktoken encoding, a tokenizer.json or .model, its directory, or a hub id."""
    vocab_size: Annotated[int | None, Key(positive=True, high=2**32)] = None
    """Vocabulary size; must equal the tokenizer's."""
    eos_token_id: int | None = None
    """EOS id; must equal the tokenizer's. For a tokenizer file, the token that ends documents."""
    phases: tuple[Phase, ...] = ()
    """Changes during the run, as a list of tables: from `start_step` on, `dataset_weights` and
    `lr_scale` apply. A source that is not listed keeps its weight, or has weight 0 with `inherit =
    "zero"`."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary that the sources must have. If the tokenizer is a file, manifests name it
        differently; then only the manifests' tokenizer fingerprints are compared with each
        other."""
        is_file = "/" in (name := self.tokenizer or "") or name.endswith((".json", ".model"))
        return Vocabulary(None if is_file else self.tokenizer, self.vocab_size, self.eos_token_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings(PlanSettings):
    """Everything that a run's configuration may set for its loader.

    `base` is the directory from which relative paths start.
    """

    steps: int = 0
    """Length of the run in steps; 0 means until the data end. If a flow sets the length, `steps`
    must not be larger, unless sources may repeat."""
    root: Annotated[Path | None, Key(do=_BUILD_THERE)] = None
    """Directory for all outputs of a run; by default the parent of `data_root`."""
    data_root: Annotated[Path | None, Key(do=_BUILD_THERE)] = None
    """Directory of token shards; by default `data` below `root`."""
    data_path: str | Path | None = None
    """The only source: a directory of shards, its manifest, or the URL of one of them."""
    dataset_path: str | Path | None = None
    """Another name of `data_path`, which is used if both are set."""
    mixture_toml: Annotated[Path | None, Key(do=_BUILD_THERE, folder=MIXTURES)] = None
    """Mixture of sources, or its name: demo, olmo3_1025."""
    flow_profiles_toml: Annotated[Path | None, Key(do=_BUILD_THERE, folder=FLOWS)] = None
    """Profiles of the flows, or their name: flow_profiles."""
    cache_dir: Annotated[Path | None, Key(do=LOCAL_CACHE)] = None
    """Directory on this machine for copies of files from URLs, and for the tokens of text
    sources."""
    flow_mode: str | None = None
    """Name of the flow, which sets the mixture and the number of tokens of each stage."""
    active_params_b: Annotated[float | None, Key(positive=True)] = None
    """Active parameters of the model, in 10^9; a flow with `tokens_b_ratio` needs it."""
    allow_unmanifested: bool = False
    """Also read directories without manifest.json; their .npy files are read in sorted order."""
    tokenizer_path: str | None = None
    """Tokenizer of text sources, instead of `tokenizer`; same values as `tokenizer`."""
    hf_dataset_name: str | None = None
    """The only source: a dataset on the hub; its text is tokenised."""
    pack_sequences: bool | None = None
    """Accepted for files of other loaders. Documents always share windows, so false is refused."""
    mix_temperature: Annotated[float, Key(positive=True)] = 1.0
    """Temperature T of the weights of `datasets` and `configs`: w becomes w^(1/T), so T above 1
    makes the weights more equal."""
    datasets: Any = None
    """Sources, as a list of tables with `path` or `hf_name`, `weight`, `name`, `hf_config`,
    `hf_revision`, `split` and `text_key`."""
    configs: Any = None
    """Sources, as tables by name with `path`, `id` or `train_urls`; also `validation_urls`, `name`
    (configuration on the hub), `revision`, `split` and `text_key`."""
    weights: Any = None
    """Weight of each source of `configs`, by its name."""
    anneal_start_step: Any = None
    """Step from which `anneal_weights` apply; the two keys are short for one phase."""
    anneal_weights: Any = None
    """Weights of the sources from `anneal_start_step` on, by name."""
    base: Path = Path()

    def required(self, key: str, where: str) -> Any:
        """The value of a key that this kind of run needs. Raises ConfigError if it is not set."""
        if (value := getattr(self, key)) is None:
            raise _missing(key, where)
        return value


def _keys() -> dict[str, Key]:
    types = get_type_hints(RunSettings)
    annotated = get_type_hints(RunSettings, include_extras=True)
    found = {}
    for own in fields(RunSettings):
        rules = [rule for rule in get_args(annotated[own.name]) if isinstance(rule, Key)] or [Key()]
        kinds = get_args(types[own.name]) or (types[own.name],)
        found[own.name] = replace(rules[0], types=kinds, is_required=own.default is MISSING)
    del found["base"]  # `base` is the directory of the file, not a key of the file
    return found


KEYS = _keys()


def checked(given: Mapping[str, Any], where: str) -> RunSettings:
    """Settings from the given values, by key. Raises ConfigError, which names the key."""
    for name, key in KEYS.items():
        if key.is_required and name not in given:
            raise _missing(name, where)
    if given.get("pack_sequences") is False:
        raise ConfigError(
            "a window always continues with the next document",
            where=where,
            found="pack_sequences = false",
            do='remove it; packing = "best_fit" does not cut documents',
        )
    base = given.get("base", Path())
    values = {k: _read(k, value, where, base) for k, value in given.items() if k in KEYS}
    phases = read_phases(given, where)
    return RunSettings(**values | {"phases": phases, "base": base})


def _read(name: str, value: Any, where: str, base: Path) -> Any:
    key = KEYS[name]
    place = f"{where}: {name}"
    if key.choices:
        for new, old in key.in_plans.items():
            if value in (new, old):
                if value == old:
                    text = f'{name} = "{old}" is now "{new}"; this release still reads it'
                    warnings.warn(text, FutureWarning, stacklevel=2)
                return old
        if value not in key.choices:
            raise tables.unknown_name(name, str(value), key.choices, where)
    elif bool in key.types:
        if not isinstance(value, bool):
            raise ConfigError("not true or false", where=place, found=repr(value))
    elif int in key.types or float in key.types:
        whole = int in key.types
        return tables.number(value, place, positive=key.positive, whole=whole)
    elif Path in key.types:
        value = value if isinstance(value, os.PathLike) else tables.text(value, place)
        if str in key.types:
            return value
        path = local_path(value, place, key.do)
        is_named = key.folder and isinstance(value, str)
        return find_config(value, key.folder, base, "loader", place) if is_named else path
    elif str in key.types:
        return tables.text(value, place)
    return value


def _missing(key: str, where: str) -> ConfigError:
    return ConfigError(f"{key} is missing", where=where, do=f"set {key}")
