"""Who computes an op: each backend offers the same functions, and says which problems it can take."""
