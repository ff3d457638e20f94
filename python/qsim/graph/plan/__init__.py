"""Plan: from a tape to what is quantized where. Pure."""
