//! Posts JSON to etcd, with or without TLS.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use ureq::Agent;
use ureq::tls::{RootCerts, TlsConfig};

use super::messages::refusal;
use super::options::TlsOptions;
use super::tls;

/// Limit for an answer: etcd's answers to these requests are shorter.
const MOST_BYTES: u64 = 64 * 1024;

/// An HTTP client that opens a new connection for each request.
///
/// There are few requests, and an idle connection may be dead.
pub(super) struct Http {
    agent: Agent,
    is_tls: bool,
}

impl Http {
    /// Reads the TLS files. The error names the file that cannot be used.
    pub(super) fn new(options: Option<&TlsOptions>) -> Result<Self, String> {
        let tls = options.map(tls::config).transpose()?;
        let is_tls = tls.is_some();
        let config = Agent::config_builder()
            // The claim must not depend on a proxy from the environment.
            .proxy(None)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .max_idle_connections(0)
            .max_idle_connections_per_host(0)
            .user_agent("sterna")
            .tls_config(tls.unwrap_or_else(|| {
                TlsConfig::builder().root_certs(RootCerts::Specific(Arc::default())).build()
            }))
            .https_only(is_tls)
            .build();
        Ok(Self { agent: config.new_agent(), is_tls })
    }

    /// Returns the body of an answer with status 200. The error text says what failed.
    pub(super) fn post(
        &self,
        url: &str,
        token: Option<&str>,
        body: &str,
        limit: Duration,
    ) -> Result<Vec<u8>, String> {
        if limit.is_zero() {
            return Err("the time limit ended before it could be asked".to_owned());
        }
        let mut request = self.agent.post(url).config().timeout_global(Some(limit)).build();
        request = request.header("content-type", "application/json");
        if let Some(token) = token {
            request = request.header("authorization", token);
        }
        let failed = |error: ureq::Error| self.in_words(&error, limit);
        let mut response = request.send(body).map_err(failed)?;
        let status = response.status().as_u16();
        let body = response.body_mut().with_config().limit(MOST_BYTES).read_to_vec().map_err(failed)?;
        if status == 200 { Ok(body) } else { Err(refusal(status, &body)) }
    }

    fn in_words(&self, error: &ureq::Error, limit: Duration) -> String {
        match error {
            ureq::Error::Timeout(_) => format!("no answer within {limit:.1?}"),
            ureq::Error::HostNotFound => "this host cannot resolve its host name".to_owned(),
            ureq::Error::BodyExceedsLimit(most) => {
                format!("its answer is longer than {most} bytes, so it is not an etcd")
            }
            ureq::Error::Io(error) if error.kind() == io::ErrorKind::InvalidData && self.is_tls => {
                format!("TLS with it failed: {error}")
            }
            // A TLS 1.3 server checks the client's certificate after the client has finished the handshake.
            ureq::Error::Io(error) if is_cut(error) && self.is_tls => {
                format!("{error}: it may have refused this side's certificate; its log contains the reason")
            }
            ureq::Error::Io(error) => error.to_string(),
            other => other.to_string(),
        }
    }
}

fn is_cut(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof)
}

impl fmt::Debug for Http {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Http").field("is_tls", &self.is_tls).finish()
    }
}
