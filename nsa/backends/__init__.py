"""The backends that run the ops. Each has the same functions, and reports which problems it supports."""
