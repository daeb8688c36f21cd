"""Traffic to replay: workload files, traces, and the plan of requests that both become."""
