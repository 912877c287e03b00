"""Shards in the formats of other trainers: Megatron-LM, OLMo-core and MosaicML Streaming.

The tokens are the manifest's, in its order, each document with its EOS. The directory is made under
another name and appears whole, with `export.json`; a current export is left alone.
"""
