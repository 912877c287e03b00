"""One or two examples per verb; the verb's `--help` shows them."""

EXAMPLES: dict[str, tuple[str, ...]] = {
    "nmoe": ("nmoe init && nmoe run && nmoe report",),
    "nmoe init": (
        "nmoe init corpus/",
        "nmoe init --update",
        "nmoe init --configs configs/",
        "nmoe init HuggingFaceFW/fineweb --subset sample-10BT",
    ),
    "nmoe import": (
        "nmoe import megatron corpus/web_text_document --tokenizer gpt2/tokenizer.json",
        "nmoe import olmo tokens/ --tokenizer allenai/OLMo-2-1124-7B",
    ),
    "nmoe run": ("nmoe run", "nmoe run train_heads grade curate --set calibration.target_keep=0.3"),
    "nmoe ui": ("nmoe ui --port 3100",),
    "nmoe fetch": (
        "nmoe fetch smollm2",
        "nmoe fetch HuggingFaceTB/SmolLM2-360M models/smollm2-360m",
    ),
    "nmoe make-tiny-checkpoint": ("nmoe make-tiny-checkpoint tiny --family llama",),
    "nmoe completion": ("nmoe completion bash > ~/.local/share/bash-completion/completions/nmoe",),
    "nmoe prep-mixture": ("nmoe prep-mixture --dry-run", "nmoe prep-mixture --workers 8"),
    "nmoe prep": (
        "nmoe prep --source jsonl --paths 'web/*.jsonl.zst' --name web --output data/web/train",
        "nmoe prep --source hf --dataset roneneldan/TinyStories --name tales"
        " --output data/tales/train",
    ),
    "nmoe versions": ("nmoe versions list data/web/train",),
    "nmoe versions list": ("nmoe versions list data/web/train",),
    "nmoe versions compare": ("nmoe versions compare data/web/train 5ea3e6",),
    "nmoe versions restore": ("nmoe versions restore data/web/train 5ea3e6",),
    "nmoe versions remove": ("nmoe versions remove data/web/train",),
    "nmoe verify": (
        "nmoe verify data/web/train/manifest.json --deep",
        "nmoe verify s3://bucket/run/loader_plan.json --checksums",
    ),
    "nmoe info": ("nmoe info out/mixture/loader_plan.json",),
    "nmoe regenerate-index": (
        "nmoe regenerate-index data/web/train/shard_0000/web-v1-shard-000000.npy"
        " --eos-token-id 199999",
    ),
    "nmoe inspect": ("nmoe inspect --manifest data/web/train/manifest.json --sample 3",),
    "nmoe export": (
        "nmoe export olmo data/web/train/manifest.json --output olmo/web",
        "nmoe export megatron out/mixture/loader_plan.json --output megatron",
    ),
    "nmoe export llmc": ("nmoe export llmc data/web/train/manifest.json --output llmc/web",),
    "nmoe export parquet": ("nmoe export parquet data/web/train/manifest.json --output texts/web",),
    "nmoe export megatron": (
        "nmoe export megatron data/web/train/manifest.json --output megatron/web",
    ),
    "nmoe export olmo": ("nmoe export olmo data/web/train/manifest.json --output olmo/web",),
    "nmoe export mds": (
        "nmoe export mds data/web/train/manifest.json --output mds/web --seq-len 4096",
    ),
    "nmoe publish": ("nmoe publish out/mixture/loader_plan.json s3://bucket/run --dry-run",),
    "nmoe gc": ("nmoe gc", "nmoe gc --apply"),
    "nmoe attributes": ("nmoe attributes --only signals language",),
    "nmoe embed": (
        "nmoe embed --source web",
        "nmoe embed --input-jsonl web.jsonl --checkpoint SmolLM2-135M --out web.parquet",
    ),
    "nmoe perplexity": (
        "nmoe perplexity",
        "nmoe perplexity --input-jsonl web.jsonl --checkpoint SmolLM2-135M --out bits.parquet",
    ),
    "nmoe select": ("nmoe select --where \"n_words >= 50 and lang = 'en'\" --sample 5",),
    "nmoe sql": ('nmoe sql "select source, lang, count(*) from documents group by all"',),
    "nmoe hydra": ("nmoe hydra status",),
    "nmoe hydra slices": ("nmoe hydra slices",),
    "nmoe hydra oracle-label": (
        "nmoe hydra oracle-label --estimate",
        "nmoe hydra oracle-label --slices train-00 --oracle http"
        " --set oracle.http.base_url=http://localhost:8000/v1"
        " --set oracle.http.model=gpt-oss-120b",
    ),
    "nmoe hydra plan-labels": ("nmoe hydra plan-labels --budget 200",),
    "nmoe hydra requests": ("nmoe hydra requests -o requests.jsonl --slices val-00 val-01",),
    "nmoe hydra answers": ("nmoe hydra answers results.jsonl",),
    "nmoe hydra merge-labels": ("nmoe hydra merge-labels",),
    "nmoe hydra audit": ("nmoe hydra audit --documents 200",),
    "nmoe hydra agree": ("nmoe hydra agree out/labels/val/shard_0 mine.jsonl",),
    "nmoe hydra review": (
        "nmoe hydra review --kind disagreements --documents 20",
        "nmoe hydra review --correct DOC_ID --scores density=1 correctness=3 --by mara"
        " --note quoted",
    ),
    "nmoe hydra corrections": ("nmoe hydra corrections",),
    "nmoe hydra status": ("nmoe hydra status",),
    "nmoe hydra calibrate": ("nmoe hydra calibrate --target-keep 0.3",),
    "nmoe hydra grade": (
        "nmoe hydra grade --source web",
        "nmoe hydra grade --config nmoe.toml --input-jsonl new.jsonl --out graded",
    ),
    "nmoe train": ("nmoe train probe",),
    "nmoe train student": ("nmoe train student",),
    "nmoe train probe": ("nmoe train probe --epochs 10",),
    "nmoe train judge": ("nmoe train judge --set backbone.device=cuda",),
    "nmoe train import-pt": ("nmoe train import-pt hydra_probe.pt",),
    "nmoe generate": (
        "nmoe generate prompts.jsonl -o answers.jsonl --checkpoint gpt-oss-20b --max-tokens 64",
        "nmoe generate chats.jsonl -o samples.jsonl --checkpoint Qwen3-8B --n 4 --temperature 0.7",
    ),
    "nmoe curate": (
        "nmoe curate --input web.jsonl --model-dir gpt-oss-20b --output ordered.jsonl"
        " --seq-len 4096",
    ),
    "nmoe curate calibrate-k": (
        "nmoe curate calibrate-k --input web.jsonl --model-dir gpt-oss-20b",
    ),
    "nmoe curate embed": (
        "nmoe curate embed --input web.jsonl --model-dir gpt-oss-20b --output deep.npy --limit 99",
    ),
    "nmoe curate compare": ("nmoe curate compare --shallow shallow.npy --deep deep.npy",),
    "nmoe curate animate": (
        "nmoe curate animate --embeddings shallow.npy --token-counts tokens.npy --frames 60",
    ),
    "nmoe curate shards": ("nmoe curate shards --source web",),
    "nmoe ablate": ("nmoe ablate", "nmoe ablate --tokens 300000 --eval trusted.jsonl"),
    "nmoe takedown": (
        "nmoe takedown gone.txt --state checkpoints/1200.json",
        "nmoe takedown gone.txt --apply --by legal",
        "nmoe takedown gone.txt --verify",
    ),
    "nmoe plan": ("nmoe plan", "nmoe plan --set calibration.target_keep=0.3 --sample 64"),
    "nmoe explain": ("nmoe explain --step 3", "nmoe explain web/docs.jsonl:17"),
    "nmoe seen": (
        "nmoe seen --index",
        "nmoe seen 'It was the best of times' --step 5000 --limit 3",
    ),
    "nmoe exposure": (
        "nmoe exposure --step 2000",
        "nmoe exposure --by license --out exposure.parquet",
    ),
    "nmoe diff": ("nmoe diff out/mixture/remix_0001.json out/mixture/loader_plan.json",),
    "nmoe losses": (
        "nmoe losses losses/ --by topic --spike auto",
        "nmoe losses losses/ --plan plan.json --worst 50 --out report",
    ),
    "nmoe report": ("nmoe report", "nmoe report --html report/index.html"),
    "nmoe twin": (
        "nmoe twin plan.json --source web=other/web --source code=other/code --seq-len 4096"
        " -o twin.json",
    ),
    "nmoe mix": (
        "nmoe mix",
        "nmoe mix --runs 48 --target trusted=trusted.jsonl --write weights.toml",
    ),
    "nmoe remix": (
        "nmoe remix out/mixture/loader_plan.json --step 500 --weights web=0.7,code=0.3"
        " -o remixed.json",
    ),
    "nmoe bisect": (
        "nmoe bisect out/mixture/loader_plan.json --from-step 40 --to-step 44"
        " --command './replay.sh {plan}' --above 9.5 -o bisection",
    ),
}
