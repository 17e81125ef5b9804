"""A bucket as a destination; boto3 is imported here alone."""
