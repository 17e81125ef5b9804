"""The life of a job: admitted, claimed, run, ended, recovered after a crash."""
