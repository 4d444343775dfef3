//! Which bucket, and how it is reached.

use std::path::PathBuf;
use std::time::Duration;

use crate::credentials::CredentialsSource;

/// Where the bucket's name is in an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// `https://HOST/BUCKET/KEY`: most servers of one's own.
    Path,
    /// `https://BUCKET.HOST/KEY`: AWS.
    VirtualHost,
}

/// The settings of an object storage.
#[derive(Debug, Clone)]
pub struct S3Options {
    /// Address of the server: `https://HOST[:PORT][/PATH]`, or `http://…` without TLS.
    pub endpoint: String,
    /// The region of the signature.
    pub region: String,
    /// The bucket.
    pub bucket: String,
    /// Begins every key. Empty: the whole bucket.
    pub prefix: String,
    /// Where the bucket's name is in an address.
    pub style: Style,
    /// PEM file with the authorities of the server's certificate. `None`: those of the host.
    pub ca: Option<PathBuf>,
    /// Where the credentials are.
    pub credentials: CredentialsSource,
    /// Most attempts of one request, 1 to 20 (default 6).
    pub attempts: u32,
    /// Pause before the second attempt, doubled for each further one, up to 5 s (default 100 ms). Half of it is random.
    pub pause: Duration,
    /// Limit for connecting, and for the first byte of an answer (default 10 s).
    pub connect_timeout: Duration,
    /// Limit for sending or receiving a body (default 60 s).
    pub body_timeout: Duration,
    /// Length of a part of a large upload in bytes, 5 MiB to 512 MiB (default 16 MiB).
    pub part_bytes: usize,
    /// Requests at the same time for one read or upload, 1 to 16 (default 4).
    pub parallel: usize,
}

impl S3Options {
    /// The options of `bucket` and `prefix`, from the variables that AWS's tools use.
    ///
    /// `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL` (then addresses have path style), `AWS_REGION` or `AWS_DEFAULT_REGION`
    /// (default us-east-1), `AWS_CA_BUNDLE`.
    pub fn from_environment(bucket: &str, prefix: &str) -> Self {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let endpoint = variable("AWS_ENDPOINT_URL_S3").or_else(|| variable("AWS_ENDPOINT_URL"));
        let region = variable("AWS_REGION").or_else(|| variable("AWS_DEFAULT_REGION"));
        let region = region.unwrap_or_else(|| "us-east-1".to_owned());
        let style = if endpoint.is_some() { Style::Path } else { Style::VirtualHost };
        let endpoint = endpoint.unwrap_or_else(|| of_aws(&region));
        let ca = variable("AWS_CA_BUNDLE").map(PathBuf::from);
        Self { style, ca, region, ..Self::new(&endpoint, bucket, prefix) }
    }

    /// Changes the region, and with it the address of AWS's server, whose name contains the region.
    #[must_use]
    pub fn in_region(mut self, region: &str) -> Self {
        if self.endpoint == of_aws(&self.region) {
            self.endpoint = of_aws(region);
        }
        region.clone_into(&mut self.region);
        self
    }

    /// The options of a bucket at `endpoint`, with path style and credentials from the environment.
    pub fn new(endpoint: &str, bucket: &str, prefix: &str) -> Self {
        Self {
            endpoint: endpoint.to_owned(),
            region: "us-east-1".to_owned(),
            bucket: bucket.to_owned(),
            prefix: prefix.trim_matches('/').to_owned(),
            style: Style::Path,
            ca: None,
            credentials: CredentialsSource::Environment,
            attempts: 6,
            pause: Duration::from_millis(100),
            connect_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(60),
            part_bytes: 16 << 20,
            parallel: 4,
        }
    }
}

fn of_aws(region: &str) -> String {
    format!("https://s3.{region}.amazonaws.com")
}
