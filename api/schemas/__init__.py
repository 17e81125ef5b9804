"""What REST takes and gives, as pydantic models; the OpenAPI document is made of them."""
