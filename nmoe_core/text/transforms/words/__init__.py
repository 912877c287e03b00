"""Words of texts as hashes, and the transform that removes passages of equal words."""
