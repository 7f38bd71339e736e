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
  description = "Name of the pool; its nodes are called POOL-INSTANCE-GPU."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9]([a-z0-9._-]{0,30}[a-z0-9])?$", var.pool))
    error_message = "The pool's name must be 1 to 32 of a-z, 0-9, '.', '_' and '-', starting and ending with a letter or digit."
  }
}

variable "instance_type" {
  description = "EC2 instance type with NVIDIA GPUs."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9-]+\\.[a-z0-9-]+$", var.instance_type))
    error_message = "The instance type must look like g6e.2xlarge."
  }
}

variable "devices" {
  description = "GPUs of an instance that have a node each, as NVML counts them."
  type        = list(number)
  nullable    = false

  validation {
    condition     = length(var.devices) > 0 && alltrue([for gpu in var.devices : gpu >= 0 && gpu < 16 && floor(gpu) == gpu])
    error_message = "The devices must be whole numbers from 0 to 15, at least one."
  }
}

variable "min" {
  description = "Fewest instances that the pool may have."
  type        = number
  default     = 0
  nullable    = false

  validation {
    condition     = var.min >= 0 && floor(var.min) == var.min
    error_message = "The least number of instances must be a whole number, 0 or more."
  }
}

variable "desired" {
  description = "Instances that the pool has; null: left to an autoscaler, within the bounds."
  type        = number
  default     = null

  validation {
    condition     = var.desired == null ? true : var.min <= var.desired && var.desired <= var.max
    error_message = "Expected min <= desired <= max."
  }
}

variable "max" {
  description = "Most instances that the pool may have."
  type        = number
  nullable    = false

  validation {
    condition     = var.max >= var.min && floor(var.max) == var.max
    error_message = "The most instances must be a whole number, not below the fewest."
  }
}

variable "vpc_id" {
  description = "VPC of the nodes."
  type        = string
  nullable    = false

  validation {
    condition     = startswith(var.vpc_id, "vpc-")
    error_message = "The VPC must be given by its id, vpc-..."
  }
}

variable "subnet_ids" {
  description = "Subnets of the nodes, from which the registry, the gateway and the package can be reached."
  type        = list(string)
  nullable    = false

  validation {
    condition     = length(var.subnet_ids) > 0 && alltrue([for id in var.subnet_ids : startswith(id, "subnet-")])
    error_message = "Expected at least one subnet, each by its id, subnet-..."
  }
}

variable "gateway_security_group_id" {
  description = "Security group of the gateway: the only source that may reach the nodes' ports."
  type        = string
  nullable    = false

  validation {
    condition     = startswith(var.gateway_security_group_id, "sg-")
    error_message = "The security group must be given by its id, sg-..."
  }
}

variable "gateway_url" {
  description = "Where nodes reach the gateway."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^https?://[A-Za-z0-9.:\\[\\]-]+$", var.gateway_url))
    error_message = "The gateway's URL must be http:// or https:// with a host and perhaps a port, and no path."
  }
}

variable "node_port" {
  description = "Port of the first node of an instance; those of its other GPUs follow."
  type        = number
  default     = 8081
  nullable    = false

  validation {
    condition     = var.node_port >= 1024 && var.node_port <= 65000
    error_message = "The port must be between 1024 and 65000."
  }
}

variable "secret_parameter" {
  description = "Name of the SSM parameter (SecureString) that holds the cluster secret; its value is in no plan and no state."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^/[A-Za-z0-9_./-]+$", var.secret_parameter))
    error_message = "The parameter's name must begin with a slash and have letters, digits, '_', '.', '/' and '-' only."
  }
}

variable "secret_kms_key_arn" {
  description = "KMS key of that parameter; null: the account's own key for SSM, which needs no grant."
  type        = string
  default     = null
}

variable "image_parameter" {
  description = "Name of the SSM parameter that holds the id of a GPU image with driver, Python and the AWS command line."
  type        = string
  nullable    = false

  validation {
    condition     = startswith(var.image_parameter, "/")
    error_message = "The parameter's name must begin with a slash."
  }
}

variable "package" {
  description = "What pip installs on a node: the s3:// address of a wheel that `make wheel` built."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^s3://[a-z0-9][a-z0-9.-]+/[A-Za-z0-9._/+-]+\\.whl$", var.package))
    error_message = "The package must be the s3:// address of a wheel: the name garnish on PyPI is not this project's."
  }
}

variable "model_source" {
  description = "The base model's directory on S3, copied to the instance's own disk before the node starts."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^s3://[a-z0-9][a-z0-9.-]+/[A-Za-z0-9._/-]+$", var.model_source))
    error_message = "The base model must be an s3:// address."
  }
}

variable "registry_bucket" {
  description = "Bucket of the registry."
  type        = string
  nullable    = false
}

variable "registry_prefix" {
  description = "Prefix of the registry in its bucket, without slashes at its ends; empty: the whole bucket."
  type        = string
  default     = ""
  nullable    = false
}

variable "node_file" {
  description = "Service file of a node, as JSON: what a node reads of serverless.yml, without tenants, functions and secrets."
  type        = string
  nullable    = false

  validation {
    condition     = can(jsondecode(var.node_file))
    error_message = "The node's service file must be JSON."
  }
}

variable "volume_gib" {
  description = "Size of the encrypted root volume."
  type        = number
  default     = 100
  nullable    = false

  validation {
    condition     = var.volume_gib >= 30
    error_message = "The root volume needs 30 GiB at least."
  }
}

variable "drain_seconds" {
  description = "How long an instance that is to go may take to end its running requests."
  type        = number
  default     = 3700
  nullable    = false

  validation {
    condition     = var.drain_seconds >= 30 && var.drain_seconds <= 7200
    error_message = "AWS keeps an instance between 30 and 7200 s."
  }
}

variable "target_group_arns" {
  description = "Target groups of a load balancer, made elsewhere, in which the instances are registered."
  type        = list(string)
  default     = []
  nullable    = false
}

variable "tags" {
  description = "Tags of the group, its instances and their volumes, beside Garnish's own."
  type        = map(string)
  default     = {}
  nullable    = false
}
