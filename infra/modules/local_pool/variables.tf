variable "service" {
  description = "Name of the service that the nodes belong to."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$", var.service))
    error_message = "The service's name must be 1 to 64 of a-z, 0-9, '.', '_' and '-', starting and ending with a letter or digit."
  }
}

variable "pool" {
  description = "Name of the pool; its nodes are called POOL-1, POOL-2, ..."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$", var.pool))
    error_message = "The pool's name must be 1 to 64 of a-z, 0-9, '.', '_' and '-', starting and ending with a letter or digit."
  }
}

variable "min" {
  description = "Fewest nodes that the pool may have."
  type        = number
  default     = 0
  nullable    = false

  validation {
    condition     = var.min >= 0 && floor(var.min) == var.min
    error_message = "The least number of nodes must be a whole number, 0 or more."
  }
}

variable "desired" {
  description = "Nodes that the pool has."
  type        = number
  nullable    = false

  validation {
    condition     = floor(var.desired) == var.desired && var.min <= var.desired && var.desired <= var.max
    error_message = "The desired number of nodes must be a whole number with min <= desired <= max."
  }
}

variable "max" {
  description = "Most nodes that the pool may have; one host takes 64."
  type        = number
  nullable    = false

  validation {
    condition     = var.max <= 64 && floor(var.max) == var.max
    error_message = "One host takes at most 64 nodes."
  }
}

variable "program" {
  description = "Command that starts and ends nodes: `create` or `stop` and a JSON text are appended to it."
  type        = list(string)
  nullable    = false

  validation {
    condition     = length(var.program) > 0 && alltrue([for word in var.program : length(word) > 0])
    error_message = "The program must be a command of at least one word, none of them empty."
  }
}

variable "host" {
  description = "What a node is started with. Paths are absolute; secret_file names a file and never holds the secret itself."
  type = object({
    service_file = string
    state        = string
    gateway_url  = string
    secret_file  = string
    registry     = string
  })
  nullable = false

  validation {
    condition     = alltrue([for path in [var.host.service_file, var.host.state, var.host.secret_file] : startswith(path, "/")])
    error_message = "The paths service_file, state and secret_file must be absolute."
  }

  validation {
    condition     = can(regex("^https?://", var.host.gateway_url))
    error_message = "The gateway's URL must begin with http:// or https://."
  }
}

variable "host_nodes" {
  description = "How many nodes, of all pools, divide the host's cores. A node takes its share when it starts: another number replaces none."
  type        = number
  default     = 1
  nullable    = false

  validation {
    condition     = var.host_nodes >= 1 && floor(var.host_nodes) == var.host_nodes
    error_message = "The number of nodes that divide the host's cores must be a whole number, 1 or more."
  }
}

variable "revision" {
  description = "Digest of all settings that a node reads at its start; nodes of another revision are replaced."
  type        = string
  nullable    = false
}
