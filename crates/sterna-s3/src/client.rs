//! Signed requests, which are repeated if the server or the network fails.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use jiff::Timestamp;
use rusty_s3::{Bucket, Method, UrlStyle, signing};
use sterna_store::StoreError;
use ureq::Agent;
use ureq::http::{HeaderMap, Request};
use ureq::tls::{RootCerts, TlsConfig};

use crate::credentials::Keys;
use crate::options::{S3Options, Style};
use crate::tls;

/// Longest pause between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Seconds for which a signature is valid.
const VALID: u64 = 900;
/// What a server answers if the bucket itself is missing.
const NO_BUCKET: &str = "NoSuchBucket";
/// Limit for the body of an answer that is no object.
pub(crate) const MESSAGE: u64 = 4 << 20;

/// A client of one bucket.
pub(crate) struct Client {
    agent: Agent,
    bucket: Bucket,
    keys: Keys,
    pub(crate) options: S3Options,
    /// The bucket and the prefix, for errors.
    pub(crate) name: String,
}

/// One request.
pub(crate) struct Call<'a> {
    pub(crate) method: Method,
    /// The whole key. Empty: the bucket.
    pub(crate) key: &'a str,
    /// Sorted by name.
    pub(crate) query: &'a [(&'a str, &'a str)],
    /// Headers that are sent and not signed.
    pub(crate) headers: &'a [(&'a str, String)],
    /// Headers that are signed, sorted by name, in lower case.
    pub(crate) signed: &'a [(&'a str, String)],
    pub(crate) body: &'a [u8],
    /// Limit of the answer's body in bytes.
    pub(crate) limit: u64,
}

impl Default for Call<'_> {
    fn default() -> Self {
        let method = Method::Get;
        Self { method, key: "", query: &[], headers: &[], signed: &[], body: &[], limit: MESSAGE }
    }
}

impl<'a> Call<'a> {
    /// A call about one object.
    pub(crate) fn of(key: &'a str) -> Self {
        Self { key, ..Self::default() }
    }

    fn has_range(&self) -> bool {
        self.headers.iter().any(|(name, _)| *name == "range")
    }
}

/// An answer whose status is below 300.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
    /// An earlier attempt may have been performed, although its answer did not arrive.
    pub(crate) was_repeated: bool,
}

/// A request that failed finally.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) status: Option<u16>,
    pub(crate) reason: String,
    /// An earlier attempt may have been performed.
    pub(crate) was_repeated: bool,
}

/// The failure of one attempt.
struct Failed {
    status: Option<u16>,
    reason: String,
    can_repeat: bool,
}

impl Client {
    pub(crate) fn new(options: S3Options) -> Result<Self, StoreError> {
        let name = match options.prefix.as_str() {
            "" => format!("s3://{}", options.bucket),
            prefix => format!("s3://{}/{prefix}", options.bucket),
        };
        let wrong = |reason: String| StoreError::Remote { name: name.clone(), reason, status: None };
        let endpoint = options.endpoint.parse();
        let endpoint =
            endpoint.map_err(|error| wrong(format!("the endpoint {:?}: {error}", options.endpoint)))?;
        let style = match options.style {
            Style::Path => UrlStyle::Path,
            Style::VirtualHost => UrlStyle::VirtualHost,
        };
        let bucket = Bucket::new(endpoint, style, options.bucket.clone(), options.region.clone());
        let bucket =
            bucket.map_err(|error| wrong(format!("the endpoint {:?}: {error}", options.endpoint)))?;
        let is_tls = options.endpoint.starts_with("https:");
        let tls = if is_tls {
            tls::config(options.ca.as_deref()).map_err(wrong)?
        } else {
            TlsConfig::builder().root_certs(RootCerts::Specific(Arc::default())).build()
        };
        let config = Agent::config_builder()
            .proxy(None)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .max_idle_connections_per_host(options.parallel.clamp(1, 16))
            .timeout_connect(Some(options.connect_timeout))
            .timeout_recv_response(Some(options.connect_timeout))
            .timeout_send_body(Some(options.body_timeout))
            .timeout_recv_body(Some(options.body_timeout))
            .user_agent("sterna")
            .tls_config(tls)
            .https_only(is_tls)
            .build();
        let keys = Keys::new(options.credentials.clone());
        Ok(Self { agent: config.new_agent(), bucket, keys, name, options })
    }

    /// The whole key of a key in the prefix.
    pub(crate) fn key(&self, key: &str) -> String {
        match self.options.prefix.as_str() {
            "" => key.to_owned(),
            prefix => format!("{prefix}/{key}"),
        }
    }

    /// The address of an object, for errors.
    pub(crate) fn address(&self, whole_key: &str) -> String {
        format!("s3://{}/{whole_key}", self.options.bucket)
    }

    /// Sends a request until it succeeds, is refused, or all attempts have failed.
    ///
    /// `check` may refuse an answer, which is then asked for again.
    pub(crate) fn call(
        &self,
        call: &Call<'_>,
        check: impl Fn(&Answer) -> Result<(), String>,
    ) -> Result<Answer, Refusal> {
        let attempts = self.options.attempts.clamp(1, 20);
        let mut attempt = 1;
        loop {
            let done = self.attempt(call).and_then(|mut answer| {
                answer.was_repeated = attempt > 1;
                check(&answer).map(|()| answer).map_err(|reason| Failed {
                    status: None,
                    reason,
                    can_repeat: true,
                })
            });
            let failed = match done {
                Ok(answer) => return Ok(answer),
                Err(failed) => failed,
            };
            if !failed.can_repeat || attempt == attempts {
                let tries = if attempt > 1 { format!(" ({attempt} attempts)") } else { String::new() };
                let reason = failed.reason + &tries;
                return Err(Refusal { status: failed.status, reason, was_repeated: attempt > 1 });
            }
            tracing::debug!("{}: attempt {attempt}: {}", self.address(call.key), failed.reason);
            thread::sleep(pause(self.options.pause, attempt, fastrand::f64()));
            attempt += 1;
        }
    }

    fn attempt(&self, call: &Call<'_>) -> Result<Answer, Failed> {
        let finally = |reason: String| Failed { status: None, reason, can_repeat: false };
        let credentials = self.keys.get().map_err(finally)?;
        let url = if call.key.is_empty() {
            self.bucket.base_url().clone()
        } else {
            self.bucket.object_url(call.key)
        };
        let url = signing::sign(
            &Timestamp::now(),
            call.method,
            url,
            credentials.key(),
            credentials.secret(),
            credentials.token(),
            self.bucket.region(),
            VALID,
            call.query.iter().copied(),
            call.signed.iter().map(|(name, value)| (*name, value.as_str())),
        );
        let mut request = Request::builder().method(call.method.to_str()).uri(url.as_str());
        for (name, value) in call.headers.iter().chain(call.signed) {
            request = request.header(*name, value);
        }
        let again = |reason: String| Failed { status: None, reason, can_repeat: true };
        let sent = match call.method {
            Method::Put | Method::Post => {
                let request = request.body(call.body).map_err(|error| finally(error.to_string()))?;
                self.agent.run(request)
            }
            _ => {
                let request = request.body(()).map_err(|error| finally(error.to_string()))?;
                self.agent.run(request)
            }
        };
        // The address in an error would contain the signature.
        let mut response = sent.map_err(|error| again(words(&error)))?;
        let status = response.status().as_u16();
        let headers = response.headers().clone();
        if status >= 300 {
            let message = response.body_mut().with_config().limit(MESSAGE).read_to_vec().unwrap_or_default();
            let reason = refusal(status, &message);
            // A body that changed or broke off on its way is sent again.
            let is_of_transport = status == 400
                && ["BadDigest", "IncompleteBody", "RequestTimeout"].iter().any(|code| reason.contains(code));
            let can_repeat = is_of_transport || matches!(status, 408 | 429 | 500 | 502 | 503 | 504);
            return Err(Failed { status: Some(status), reason, can_repeat });
        }
        let body = response.body_mut().with_config().limit(call.limit).read_to_vec();
        let body = body.map_err(|error| Failed {
            status: Some(status),
            reason: words(&error),
            // A range that is too long is an error of the server. An object that is too long stays so.
            can_repeat: !matches!(error, ureq::Error::BodyExceedsLimit(_)) || call.has_range(),
        })?;
        Ok(Answer { status, headers, body, was_repeated: false })
    }

    /// The error of a request about the object `whole_key`.
    pub(crate) fn error(&self, whole_key: &str, refusal: Refusal) -> StoreError {
        let name = self.address(whole_key);
        match refusal.status {
            Some(404) if !refusal.reason.contains(NO_BUCKET) => StoreError::Missing { name },
            Some(409 | 412) => StoreError::Conflict { name },
            status => StoreError::Remote { name, reason: refusal.reason, status },
        }
    }
}

/// The pause before the next attempt: it doubles, and half of it is random, so that many clients do not come back together.
fn pause(first: Duration, attempt: u32, random: f64) -> Duration {
    let doubled = first.saturating_mul(1 << (attempt - 1).min(16)).min(LONGEST_PAUSE);
    doubled.mul_f64(0.5 + random / 2.0)
}

fn words(error: &ureq::Error) -> String {
    match error {
        ureq::Error::Timeout(what) => format!("the server did not answer in time ({what})"),
        ureq::Error::HostNotFound => "this host cannot resolve the server's host name".to_owned(),
        ureq::Error::BodyExceedsLimit(most) => format!("the answer is longer than {most} bytes"),
        ureq::Error::Io(error) => format!("the connection failed: {error}"),
        ureq::Error::BadUri(_) => "the server's address cannot be used".to_owned(),
        other => other.to_string(),
    }
}

/// A refusal in words, with the code of S3's message and the next step.
fn refusal(status: u16, body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    let code = crate::xml::element(&text, "Code").unwrap_or_default();
    let next = match (status, code) {
        (404, NO_BUCKET) => ": create the bucket, or check its name",
        (403, "RequestTimeTooSkewed") => ": set this host's clock",
        (403, _) => ": check the credentials, their right to the bucket, and the region",
        (301 | 307, _) => ": the bucket is in another region, or needs the other style of addresses",
        (416, _) => ": the object is shorter than it was when it was opened",
        _ => "",
    };
    let code = if code.is_empty() { String::new() } else { format!(" {code}") };
    format!("the server answered {status}{code}{next}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_to_a_limit_and_are_half_random() {
        let first = Duration::from_millis(100);

        assert_eq!(pause(first, 1, 0.0), Duration::from_millis(50));
        assert_eq!(pause(first, 3, 1.0), Duration::from_millis(400));
        assert_eq!(pause(first, 60, 1.0), LONGEST_PAUSE);
    }
}
