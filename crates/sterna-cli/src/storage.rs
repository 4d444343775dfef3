//! Arguments for images in object storages.

use std::path::PathBuf;
use std::sync::Arc;

use sterna_s3::{CredentialsSource, S3Options, S3Storages, Style};
use sterna_store::{CacheOptions, RangeCache, StoreError, use_storages};

use crate::exit::Stop;
use crate::units;

const HEADING: &str = "Object storage (s3://)";

/// How object storages (`s3://`) are reached.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Storage {
    /// Address of the S3 server: https://HOST[:PORT] or http://HOST[:PORT] [default: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, or
    /// AWS]
    #[arg(help_heading = HEADING, long, value_name = "URL")]
    pub s3_endpoint: Option<String>,
    /// Region of the bucket [default: AWS_REGION, AWS_DEFAULT_REGION, or us-east-1]
    #[arg(help_heading = HEADING, long, value_name = "NAME")]
    pub s3_region: Option<String>,
    /// Write the bucket into the path of addresses, not into the host name [default: if an endpoint is given]
    #[arg(help_heading = HEADING, long)]
    pub s3_path_style: bool,
    /// Write the bucket into the host name of addresses, also if an endpoint is given
    #[arg(help_heading = HEADING, long, conflicts_with = "s3_path_style")]
    pub s3_virtual_host: bool,
    /// PEM file with the authorities of the server's certificate [default: AWS_CA_BUNDLE, or those of this host]
    #[arg(help_heading = HEADING, long, value_name = "FILE")]
    pub s3_ca: Option<PathBuf>,
    /// Command that prints the credentials as JSON, as `credential_process` of AWS [default: AWS_ACCESS_KEY_ID and
    /// AWS_SECRET_ACCESS_KEY, or the profile AWS_PROFILE of ~/.aws/credentials]
    #[arg(help_heading = HEADING, long, value_name = "COMMAND")]
    pub s3_credentials_command: Option<String>,
    /// Directory for parts of images that were read from object storages. The processes of a host share it
    #[arg(help_heading = HEADING, long, value_name = "DIR")]
    pub cache: Option<PathBuf>,
    /// Limit of that directory; at least 16M
    #[arg(help_heading = HEADING, long, value_name = "SIZE", default_value = "4G", value_parser = cache_size)]
    pub cache_size: u64,
}

/// The smallest limit of the cache's directory in bytes.
const LEAST_CACHE: u64 = 16 << 20;

fn cache_size(text: &str) -> Result<u64, String> {
    let bytes = units::parse_size(text)?;
    match bytes < LEAST_CACHE {
        true => Err(format!("`{text}` is too little: at least {}", units::bytes(LEAST_CACHE))),
        false => Ok(bytes),
    }
}

impl Storage {
    /// From now on, this process opens `s3://` addresses with these settings. Sends no request.
    pub fn install(&self) -> Result<(), Stop> {
        let failed = |error: StoreError| Stop::of_image(&error.into(), &[]);
        let directory = self.cache.clone().map(|directory| (directory, self.cache_size));
        let cache =
            RangeCache::new(&CacheOptions { directory, ..CacheOptions::default() }).map_err(failed)?;
        use_storages(Arc::new(S3Storages::new(self.options(), cache)));
        Ok(())
    }

    fn options(&self) -> S3Options {
        let mut options = S3Options::from_environment("", "");
        if let Some(region) = &self.s3_region {
            // The host name of AWS's default address contains the region.
            options = options.in_region(region);
        }
        if let Some(endpoint) = &self.s3_endpoint {
            (options.endpoint, options.style) = (endpoint.clone(), Style::Path);
        }
        match (self.s3_path_style, self.s3_virtual_host) {
            (true, _) => options.style = Style::Path,
            (_, true) => options.style = Style::VirtualHost,
            _ => {}
        }
        if let Some(ca) = &self.s3_ca {
            options.ca = Some(ca.clone());
        }
        if let Some(command) = &self.s3_credentials_command {
            options.credentials = CredentialsSource::Command(command.clone());
        }
        options
    }
}
