mock_provider "aws" {
  mock_resource "aws_s3_bucket" {
    defaults = {
      arn = "arn:aws:s3:::acme-adapters"
      id  = "acme-adapters"
    }
  }
}

variables {
  bucket = "acme-adapters"
}

run "is_private_versioned_and_encrypted" {
  command = apply

  assert {
    condition     = aws_s3_bucket_versioning.registry.versioning_configuration[0].status == "Enabled"
    error_message = "The bucket must be versioned."
  }

  assert {
    condition     = aws_s3_bucket_public_access_block.registry.restrict_public_buckets && aws_s3_bucket_public_access_block.registry.block_public_policy
    error_message = "Public access must be blocked."
  }

  assert {
    condition     = one(aws_s3_bucket_server_side_encryption_configuration.registry.rule).apply_server_side_encryption_by_default[0].sse_algorithm == "AES256"
    error_message = "Objects must be encrypted."
  }
}

run "refuses_a_bad_bucket_name" {
  command = plan

  variables {
    bucket = "Acme_Adapters"
  }

  expect_failures = [var.bucket]
}

run "refuses_no_days" {
  command = plan

  variables {
    noncurrent_days = 0
  }

  expect_failures = [var.noncurrent_days]
}
