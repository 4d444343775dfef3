//! The text by which an operator selects an arbiter.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use crate::arbiter::Arbiter;
use crate::ask::{Ask, Operator};
use crate::command::CommandLine;
use crate::etcd::{Etcd, EtcdOptions};
use crate::exec::Exec;
use crate::file::FileArbiter;
use crate::watched::Watched;

/// Time by which a call may exceed the arbiter's own limit.
///
/// A killed command may need it to end, for example.
const GRACE: Duration = Duration::from_secs(2);
const KINDS: &str = "etcd:URL[,URL...][,OPTION=VALUE...], file:DIR, exec:COMMAND or ask";

/// The arbiter that an operator selected, as parsed from text.
///
/// | text | decides by |
/// | --- | --- |
/// | `etcd:URL[,URL...][,OPTION=VALUE...]` | a transaction in etcd; `ca=`, `cert=`, `key=`, `user=`, `password-file=`, `prefix=` |
/// | `file:DIR` | a file in a directory that both sides see |
/// | `exec:COMMAND` | a [command](CommandLine): exit code 0 means won, 1 means lost |
/// | `ask` | an operator, through [`Operator`] |
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    text: String,
    kind: Kind,
}

/// A text that names no arbiter, or an arbiter that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the arbiter {spec:?} cannot be used: {problem}")]
#[non_exhaustive]
pub struct SpecError {
    /// The text that was parsed.
    pub spec: String,
    /// The mistake in it, and how to correct it.
    pub problem: String,
}

/// An arbiter that is ready for claims.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Opened {
    /// The arbiter, wrapped in [`Watched`].
    pub arbiter: Arc<dyn Arbiter>,
    /// The operator's interface, if the arbiter is `ask`.
    pub operator: Option<Operator>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Kind {
    Etcd(EtcdOptions),
    File(PathBuf),
    Exec(CommandLine),
    Ask,
}

impl Spec {
    /// Reads the files that the text names and makes the arbiter, without asking it.
    ///
    /// `limit` is the time for one call. A command or a network connection that is cut off at the limit may
    /// take 2 s more.
    ///
    /// # Errors
    /// A file with certificates or a password cannot be used.
    pub fn open(&self, limit: Duration) -> Result<Opened, SpecError> {
        let mut operator = None;
        let (arbiter, limit): (Arc<dyn Arbiter>, _) = match &self.kind {
            Kind::Etcd(options) => {
                let etcd = Etcd::open(options, self.name(), limit)
                    .map_err(|problem| SpecError { spec: self.text.clone(), problem })?;
                (Arc::new(etcd), limit + GRACE)
            }
            Kind::File(directory) => (Arc::new(FileArbiter::new(directory)), limit),
            Kind::Exec(line) => (Arc::new(Exec::new(line.clone(), limit)), limit + GRACE),
            Kind::Ask => (Arc::new(Ask(operator.insert(Operator::default()).clone())), limit),
        };
        Ok(Opened { arbiter: Arc::new(Watched::new(arbiter, self.name(), limit)), operator })
    }

    fn name(&self) -> String {
        format!("the arbiter {}", self.text)
    }
}

impl FromStr for Spec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let kind = kind(text).map_err(|problem| SpecError { spec: text.to_owned(), problem })?;
        Ok(Self { text: text.to_owned(), kind })
    }
}

fn kind(text: &str) -> Result<Kind, String> {
    if text == "ask" {
        return Ok(Kind::Ask);
    }
    let Some((word, rest)) = text.split_once(':') else { return Err(format!("it is not one of {KINDS}")) };
    match word {
        "etcd" => EtcdOptions::parse(rest).map(Kind::Etcd),
        "file" if rest.contains('\0') => Err("the directory's name has a NUL character".to_owned()),
        // A relative path would depend on the directory in which each side was started.
        "file" if !Path::new(rest).is_absolute() => {
            Err("file: needs the absolute path of a directory that both sides share, such as file:/mnt/shared/claims".to_owned())
        }
        "file" => Ok(Kind::File(PathBuf::from(rest))),
        "exec" => rest.parse().map(Kind::Exec).map_err(|error| format!("{error}")),
        "ask" => Err("ask has no options".to_owned()),
        _ => Err(format!("unknown arbiter {word:?}; use {KINDS}")),
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_is_read_and_printed_as_it_was() {
        for text in ["ask", "file:/mnt/a b", "exec:/bin/claim 'a b'", "etcd:http://127.0.0.1:2379"] {
            let spec: Spec = text.parse().expect(text);
            assert_eq!(spec.to_string(), text);
            let opened = spec.open(Duration::from_secs(1)).expect(text);
            assert_eq!(opened.operator.is_some(), text == "ask");
        }
    }

    #[test]
    fn each_mistake_is_named() {
        for (text, what) in [
            ("", "not one of etcd:"),
            ("file", "not one of etcd:"),
            ("zookeeper:a", "unknown arbiter \"zookeeper\""),
            ("ask:me", "has no options"),
            ("file:", "absolute path of a directory"),
            ("file:claims", "absolute path of a directory"),
            ("file:/a\0b", "NUL"),
            ("exec:", "empty"),
            ("exec:a 'b", "not closed"),
            ("etcd:", "no URL"),
        ] {
            let error = text.parse::<Spec>().expect_err(text).to_string();
            assert!(error.contains(what), "{text:?}: {error}");
        }
    }
}
