"""What keeps a process alive and honest: child processes, periodic work, the leader, the clock."""
