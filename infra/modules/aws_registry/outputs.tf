output "bucket" {
  description = "Name of the bucket."
  value       = aws_s3_bucket.registry.id
}

output "arn" {
  description = "ARN of the bucket."
  value       = aws_s3_bucket.registry.arn
}
