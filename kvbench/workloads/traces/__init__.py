"""Readers of request traces: one request at a time, whatever the file's size, and what each format cannot carry."""
