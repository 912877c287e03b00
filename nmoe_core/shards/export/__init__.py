"""Exports shards to the formats of other trainers: Megatron-LM, OLMo-core, MosaicML Streaming,
llm.c, and texts as Hugging Face datasets.

The tokens are in the order of the manifest, and each document ends with its EOS. The directory is
written under a temporary name, then renamed; it contains `export.json`. An up-to-date export is not
written again.
"""
