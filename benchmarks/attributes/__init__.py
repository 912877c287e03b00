"""What attributes find of what was planted into real text, beside other deduplicators."""
