"""Node pools as Terraform modules and the runner around them. Nothing is built here yet."""
