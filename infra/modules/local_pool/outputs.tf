output "nodes" {
  description = "Ids of the pool's nodes, as the gateway shows them."
  value       = local.nodes
}
