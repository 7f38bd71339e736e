variable "bucket" {
  description = "Name of the bucket that holds the registry."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", var.bucket))
    error_message = "A bucket's name has 3 to 63 of a-z, 0-9, '.' and '-', and starts and ends with a letter or digit."
  }
}

variable "noncurrent_days" {
  description = "Days for which overwritten and deleted objects can be brought back."
  type        = number
  default     = 30
  nullable    = false

  validation {
    condition     = var.noncurrent_days >= 1 && floor(var.noncurrent_days) == var.noncurrent_days
    error_message = "The days must be a whole number, 1 or more."
  }
}

variable "kms_key_arn" {
  description = "KMS key that encrypts the objects; null: S3's own keys (AES256)."
  type        = string
  default     = null

  validation {
    condition     = var.kms_key_arn == null || can(regex("^arn:[a-z-]+:kms:", var.kms_key_arn))
    error_message = "The KMS key must be given by its ARN."
  }
}
