"""Readers of what ranks leave behind: NCCL logs, watchdog text, flight-recorder dumps, profiles, RAS snapshots."""
