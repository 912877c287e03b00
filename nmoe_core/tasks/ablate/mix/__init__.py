"""`nmoe mix`: proposes mixture weights from the losses of many small decoders, and tests them."""
