locals {
  nodes = tolist([for number in range(var.desired) : "${var.pool}-${number + 1}"])
}

# A node is a process, which Terraform neither starts nor sees by itself: the program below does, and
# `garnish infra plan` asks for the replacement of a node whose process has died.
resource "terraform_data" "node" {
  for_each = toset(local.nodes)

  input = {
    program = var.program
    spec = jsonencode({
      service      = var.service
      pool         = var.pool
      node         = each.key
      service_file = var.host.service_file
      state        = var.host.state
      gateway_url  = var.host.gateway_url
      secret_file  = var.host.secret_file
      host_nodes   = var.host_nodes
    })
  }

  # The program may move (another virtual environment), and pools may come and go beside this one, without a restart of
  # the nodes that run.
  triggers_replace = {
    revision = var.revision
    host     = var.host
  }

  provisioner "local-exec" {
    interpreter = concat(self.input.program, ["create"])
    command     = self.input.spec
    quiet       = true
  }

  provisioner "local-exec" {
    when        = destroy
    interpreter = concat(self.output.program, ["stop"])
    command     = self.output.spec
    quiet       = true
  }
}
