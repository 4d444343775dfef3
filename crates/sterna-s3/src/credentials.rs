//! Where the keys of an object storage come from.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rusty_s3::Credentials;
use serde_json::Value;

/// Credentials of a file or a command are read again after this time, because they may be temporary.
const FRESH: Duration = Duration::from_secs(300);

/// Where the credentials are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CredentialsSource {
    /// `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and `AWS_SESSION_TOKEN`; otherwise the profile `AWS_PROFILE` (default:
    /// `default`) of `AWS_SHARED_CREDENTIALS_FILE` (default: `~/.aws/credentials`).
    Environment,
    /// A profile of a file in the form of `~/.aws/credentials`.
    File {
        /// The file.
        path: PathBuf,
        /// The profile's name.
        profile: String,
    },
    /// The output of this command line, run by `sh`: JSON with `AccessKeyId`, `SecretAccessKey` and perhaps `SessionToken`, as
    /// AWS's `credential_process`.
    Command(String),
}

/// Credentials that are read when they are needed.
#[derive(Debug)]
pub(crate) struct Keys {
    source: CredentialsSource,
    known: Mutex<Option<(Credentials, Instant)>>,
}

impl Keys {
    pub(crate) fn new(source: CredentialsSource) -> Self {
        Self { source, known: Mutex::default() }
    }

    /// The credentials, read at most five minutes ago. The error says what is missing, without any secret.
    pub(crate) fn get(&self) -> Result<Credentials, String> {
        let mut known = self.known.lock();
        if let Some((credentials, since)) = &*known
            && since.elapsed() < FRESH
        {
            return Ok(credentials.clone());
        }
        let credentials = read(&self.source)?;
        *known = Some((credentials.clone(), Instant::now()));
        Ok(credentials)
    }
}

fn read(source: &CredentialsSource) -> Result<Credentials, String> {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    match source {
        CredentialsSource::Environment => {
            let (key, secret) = (variable("AWS_ACCESS_KEY_ID"), variable("AWS_SECRET_ACCESS_KEY"));
            if let (Some(key), Some(secret)) = (key, secret) {
                return Ok(credentials(key, secret, variable("AWS_SESSION_TOKEN")));
            }
            let home = || variable("HOME").map(|home| PathBuf::from(home).join(".aws/credentials"));
            let path = variable("AWS_SHARED_CREDENTIALS_FILE").map(PathBuf::from).or_else(home);
            let profile = variable("AWS_PROFILE").unwrap_or_else(|| "default".to_owned());
            let path = path.filter(|path| path.exists()).ok_or(
                "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or write ~/.aws/credentials",
            )?;
            read(&CredentialsSource::File { path, profile })
        }
        CredentialsSource::File { path, profile } => {
            let text = std::fs::read_to_string(path);
            let text = text.map_err(|error| format!("{}: {error}", path.display()))?;
            of_profile(&text, profile).ok_or_else(|| {
                format!(
                    "{}: the profile [{profile}] has no aws_access_key_id and aws_secret_access_key",
                    path.display()
                )
            })
        }
        CredentialsSource::Command(line) => {
            let output = Command::new("sh").arg("-c").arg(line).output();
            let output = output.map_err(|error| format!("the command for credentials: {error}"))?;
            if !output.status.success() {
                let said = String::from_utf8_lossy(&output.stderr);
                return Err(format!(
                    "the command for credentials failed ({}): {}",
                    output.status,
                    said.trim()
                ));
            }
            of_json(&output.stdout).ok_or_else(|| {
                "the command for credentials wrote no JSON with AccessKeyId and SecretAccessKey".to_owned()
            })
        }
    }
}

fn credentials(key: String, secret: String, token: Option<String>) -> Credentials {
    match token {
        Some(token) => Credentials::new_with_token(key, secret, token),
        None => Credentials::new(key, secret),
    }
}

fn of_profile(text: &str, profile: &str) -> Option<Credentials> {
    let head = format!("[{profile}]");
    let lines = text.lines().map(str::trim).skip_while(|line| *line != head).skip(1);
    let (mut key, mut secret, mut token) = (None, None, None);
    for line in lines.take_while(|line| !line.starts_with('[')) {
        let Some((name, value)) = line.split_once('=') else { continue };
        let value = Some(value.trim().to_owned());
        match name.trim() {
            "aws_access_key_id" => key = value,
            "aws_secret_access_key" => secret = value,
            "aws_session_token" => token = value,
            _ => {}
        }
    }
    Some(credentials(key?, secret?, token))
}

fn of_json(bytes: &[u8]) -> Option<Credentials> {
    let value: Value = serde_json::from_slice(bytes).ok()?;
    let text = |name: &str| value[name].as_str().map(str::to_owned);
    Some(credentials(text("AccessKeyId")?, text("SecretAccessKey")?, text("SessionToken")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profile_of_a_file_is_found() {
        let text = "[default]\naws_access_key_id = a\naws_secret_access_key=b\n\n[other]\naws_access_key_id=c\n\
                    aws_secret_access_key = d\naws_session_token = e\n";

        let default = of_profile(text, "default").unwrap();
        assert_eq!((default.key(), default.secret(), default.token()), ("a", "b", None));
        assert_eq!(of_profile(text, "other").unwrap().token(), Some("e"));
        assert!(of_profile(text, "third").is_none());
    }

    #[test]
    fn command_is_asked_for_credentials() {
        let command = |line: &str| read(&CredentialsSource::Command(line.to_owned()));

        let json = r#"printf '{"Version":1,"AccessKeyId":"a","SecretAccessKey":"b","SessionToken":"c"}'"#;
        assert_eq!(command(json).unwrap().token(), Some("c"));
        assert!(command("echo refused >&2; exit 3").unwrap_err().contains("refused"));
        assert!(command("echo nothing").unwrap_err().contains("no JSON"));
    }
}
