"""Measurements on this host: each case runs in a child process and answers with raw samples."""
