"""`kvbench deadlock-diagnose`: which collective diverged first, who waits for whom, and what to capture next."""
