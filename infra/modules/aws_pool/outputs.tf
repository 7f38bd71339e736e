output "autoscaling_group" {
  description = "Name of the autoscaling group."
  value       = aws_autoscaling_group.nodes.name
}

output "role_arn" {
  description = "ARN of the nodes' role, for policies of buckets and keys elsewhere."
  value       = aws_iam_role.node.arn
}

output "security_group_id" {
  description = "Security group of the nodes."
  value       = aws_security_group.node.id
}
