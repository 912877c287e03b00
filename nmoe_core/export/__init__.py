"""Shards in the formats of other trainers: Megatron-LM, OLMo-core and MosaicML Streaming.

The tokens are those of the manifest, in its order, each document with its EOS. The directory is
made aside and appears whole, `export.json` with it; an export that is current is left alone.
"""
