"""The states of outputs: current, stale with reasons, missing, or open.

An output is open if one of its inputs will be made again: the output is made again only if the
bytes of that input change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Literal

from nmoe_core.base.errors import NmoeError
from nmoe_core.config.run import Run
from nmoe_core.tasks.graph import graded
from nmoe_core.tasks.graph.differences import Change, Look, unique
from nmoe_core.tasks.graph.looked import Looked, Reads

Status = Literal["current", "stale", "missing", "open"]

# These outputs record their inputs in their content, so other inputs give other bytes.
_NAMING_INPUTS = (
    *("backbone", "student", "probe_head", "judge_head", "calibration", "quality_scores"),
    *("topic_model", "topics", "curated", "curated_manifest"),
)
# These outputs depend only on the rows of their inputs, which may be the same after the inputs are
# made again.
_BY_CONTENT = ("selection", "buckets", "seen_index")


@dataclass(slots=True)  # not frozen, as half a million of them would take twice as long
class State:
    """One output: its key, as Dagster shows it without a mixture's prefix, and its partition.

    `changes`: reasons of a stale output; `waits_for`: keys of inputs that are not current;
    `problem`: why the state is unknown.
    """

    key: str
    partition: str
    task: str
    status: Status
    changes: tuple[Change, ...] = ()
    waits_for: tuple[str, ...] = ()
    problem: str = ""

    @property
    def changes_its_bytes(self) -> bool:
        """Whether the output's bytes will change, so that outputs made from it are made again
        too."""
        is_damage = all(change.kind == "files" for change in self.changes)
        has_reason = self.status == "stale" and not self.problem
        return has_reason and not (is_damage and self.changes) and _names_inputs(self.key)

    @property
    def is_current(self) -> bool:
        """Whether the run would keep the output."""
        return self.status == "current"

    @property
    def reason(self) -> str:
        """A short reason why the output is not current."""
        told = [str(change) for change in self.changes]
        if self.problem:
            told.append(self.problem)
        if self.status == "missing":
            told = ["not made yet"]
        if self.status == "open" or not told:
            told += [f"after {key}" for key in self.waits_for]
        return "; ".join(told)


def _names_inputs(key: str) -> bool:
    return key.rpartition("/")[2] in _NAMING_INPUTS


@dataclass
class Graph:
    """The states of all outputs, in the order in which they are made."""

    run: Run
    states: dict[tuple[str, str], State] = field(default_factory=dict)
    keys: dict[str, list[State]] = field(default_factory=dict)
    _not_current: dict[str, list[State]] = field(default_factory=dict)
    _changed: set[str] = field(default_factory=set)

    def of(self, key: str, partition: str = "") -> list[State]:
        """The states of a key: of the given partition, or, if the key does not have this partition,
        of all partitions."""
        found = self.states.get((key, partition))
        return [found] if found is not None else self.keys.get(key, [])

    def _waiting(self, key: str, partition: str = "") -> list[State]:
        """The states of `of` that are not current."""
        found = self.states.get((key, partition))
        if found is None:
            return self._not_current.get(key, [])
        return [found] if not found.is_current else []

    def not_current(self) -> list[State]:
        """Outputs that would be made, in the order in which they are made."""
        return [state for state in self.states.values() if not state.is_current]

    def add(
        self,
        key: str,
        task: str,
        inputs: Iterable[str],
        look: Callable[[], Look | Sequence[Look]],
        partition: str = "",
        reads: Reads | None = None,
    ) -> None:
        """Add the state of one output, after its inputs. `reads`: what the state of an output
        without partitions depends on, if it takes long to look at."""
        if reads is not None and self._looked.is_same(key, reads):
            look = _unchanged
        behind = [state for name in inputs for state in self._waiting(name, partition)]
        waits_for = tuple(dict.fromkeys(s.key for s in behind))
        state = partial(State, key, partition, task, waits_for=waits_for)
        try:
            found = look()
        except (NmoeError, OSError) as error:
            self._changed.add(key)
            text = " ".join(str(error).split())
            if key.endswith("/curated"):  # a curated shard's offset depends on the shards before it
                waits_for = waits_for or (key,) * bool(self._waiting(key))
            made = state("open", waits_for=waits_for) if waits_for else state("stale", problem=text)
        else:
            looks = [found] if isinstance(found, Look) else found
            by_content = key.rpartition("/")[2] in _BY_CONTENT
            is_certain = any(one.changes_its_bytes for one in behind) and not by_content
            made = _state(state, looks, bool(waits_for), is_certain)
            if made.status == "missing" or made.changes:
                self._changed.add(key)
        self._keep(made)

    def add_shards(
        self,
        key: str,
        task: str,
        inputs: Sequence[str],
        look: Callable[[int], Look],
        num_shards: int,
        reads: Reads,
    ) -> None:
        """Add the states of all shards of a key, after their inputs. `look` takes the number of a
        shard and is called in their order; `reads`: what the states depend on."""
        partitions = _partitions(num_shards)
        if not self.add_remembered(key, task, inputs, partitions, reads):
            for bucket, partition in enumerate(partitions):
                self.add(key, task, inputs, partial(look, bucket), partition)

    def add_remembered(
        self, key: str, task: str, inputs: Sequence[str], partitions: Sequence[str], reads: Reads
    ) -> bool:
        """Add the states of all partitions of a key, after their inputs, without a look at its
        files; return False, and add none, if no walk remembers them."""
        if not self._looked.is_same(key, reads):
            return False
        if any(map(self._not_current.get, inputs)):
            for partition in partitions:
                self.add(key, task, inputs, _unchanged, partition)
            return True
        found = [State(key, partition, task, "current") for partition in partitions]
        self.states.update(zip([(key, partition) for partition in partitions], found))
        self.keys.setdefault(key, []).extend(found)
        return True

    def remember(self) -> None:
        """Let later walks skip the files of keys without a change."""
        self._looked.keep(self._changed)

    def fail(
        self, key: str, task: str, partition: str, problem: str, inputs: Iterable[str]
    ) -> None:
        """Add an output with an unknown state."""
        self._changed.add(key)
        behind = [state for name in inputs for state in self._waiting(name)]
        waits_for = tuple(dict.fromkeys(state.key for state in behind))
        if waits_for:
            self._keep(State(key, partition, task, "open", waits_for=waits_for))
        else:
            self._keep(State(key, partition, task, "stale", problem=problem))

    def _keep(self, state: State) -> None:
        self.states[state.key, state.partition] = state
        self.keys.setdefault(state.key, []).append(state)
        if not state.is_current:
            self._not_current.setdefault(state.key, []).append(state)

    @cached_property
    def _looked(self) -> Looked:
        return Looked(self.run.tree.looked)

    @cached_property
    def models(self) -> graded.ModelLooks:
        """Finds the inputs of the outputs from labels and backbone."""
        return graded.ModelLooks(self.run)

    @cached_property
    def grades(self) -> graded.GradeLooks:
        """Finds the inputs of scores. Raises the errors of `GradeLooks`, and
        CalibrationError if there are no thresholds."""
        from nmoe_core.quality.calibration.summary_file import load_calibration

        return graded.GradeLooks(self.run, load_calibration(self.run.tree.calibration))


def _state(
    state: Callable[..., State], looks: Sequence[Look], is_behind: bool, is_certain: bool
) -> State:
    """The state of an output, from its recorded and current inputs. `is_behind`: an input is not
    current; `is_certain`: the bytes of an input will change."""
    if any(look.then is None for look in looks):
        return state("missing")
    changes = tuple(unique(change for look in looks for change in look.changes()))
    # An input that is made again may get the bytes that it had before.
    is_own = any(change.kind != "input" for change in changes)
    if is_own or is_certain or (changes and not is_behind):
        return state("stale", changes=changes)
    return state("open" if is_behind else "current", changes=changes)


def _unchanged() -> Look:
    """The look at an output whose files a walk remembers."""
    return Look({}, {})


@cache
def _partitions(num_shards: int) -> list[str]:
    return [f"{bucket:04d}" for bucket in range(num_shards)]
