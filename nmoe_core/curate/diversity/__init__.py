"""How diverse the windows of an order are."""
