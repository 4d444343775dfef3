//! Objects that operators add and migrations refer to: TLS credentials, and lists of identities that may connect.
//!
//! `object-add` and `object-del` know the kinds that migrations need: `tls-creds-x509`, `authz-simple` and
//! `authz-list`, with QEMU's properties. Credentials are read and checked when they are added, so that an error
//! appears before a guest leaves.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};
use sterna::{Authorization, AuthorizationRule, Tls, TlsCredentials, TlsEndpoint};

use super::parameters::TlsNames;
use crate::error::QmpError;
use crate::server::Arguments;

/// The added objects, by id.
#[derive(Default)]
pub(super) struct Objects(BTreeMap<String, Object>);

#[derive(Clone)]
enum Object {
    Credentials(Arc<TlsCredentials>),
    /// With the object's kind: one identity, or a list.
    Authorization(Authorization, &'static str),
}

impl Object {
    fn kind(&self) -> &'static str {
        match self {
            Self::Credentials(_) => "tls-creds-x509",
            Self::Authorization(_, kind) => kind,
        }
    }
}

impl Objects {
    /// Executes `object-add`.
    pub(super) fn add(&mut self, arguments: &Map<String, Value>) -> Result<(), QmpError> {
        let given = Arguments(arguments);
        let kind = given.required_string("qom-type")?;
        let id = given.required_string("id")?;
        if !is_id(id) {
            return Err(QmpError::expects(
                "id",
                "an identifier: a letter, then letters, digits, '-', '.' and '_'",
            ));
        }
        if self.0.contains_key(id) {
            return Err(QmpError::generic(format!(
                "an object '{id}' exists already; delete it with 'object-del', or use another id"
            )));
        }
        let object = match kind {
            "tls-creds-x509" => Object::Credentials(Arc::new(credentials(given)?)),
            "authz-simple" => {
                given.only(&["qom-type", "id", "identity"])?;
                Object::Authorization(Authorization::only(given.required_string("identity")?), "authz-simple")
            }
            "authz-list" => Object::Authorization(list(given)?, "authz-list"),
            other => return Err(unknown_kind(other)),
        };
        self.0.insert(id.to_owned(), object);
        Ok(())
    }

    /// Executes `object-del`. Running migrations keep the credentials that they have read.
    pub(super) fn delete(&mut self, id: &str) -> Result<(), QmpError> {
        match self.0.remove(id) {
            Some(_) => Ok(()),
            None => Err(QmpError::generic(format!("object '{id}' not found"))),
        }
    }

    /// Id and kind of every object.
    pub(super) fn list(&self) -> Vec<(String, &'static str)> {
        self.0.iter().map(|(id, object)| (id.clone(), object.kind())).collect()
    }

    /// The TLS settings of the parameters `tls-creds`, `tls-hostname` and `tls-authz` for this end of a migration.
    pub(super) fn tls(&self, names: &TlsNames, endpoint: TlsEndpoint) -> Result<Option<Tls>, QmpError> {
        let given = |name| Some(name).filter(|name: &&str| !name.is_empty());
        let Some(id) = given(names.creds.as_str()) else { return Ok(None) };
        let credentials = match self.0.get(id) {
            Some(Object::Credentials(credentials)) => Arc::clone(credentials),
            Some(_) => return Err(wrong_object("tls-creds", id, "no TLS credentials")),
            None => return Err(wrong_object("tls-creds", id, "missing; add it with 'object-add'")),
        };
        if credentials.endpoint() != endpoint {
            return Err(QmpError::generic(format!(
                "Expected TLS credentials for a {} endpoint: 'tls-creds' names '{id}', which is for a {}; add one \
                 with \"endpoint\": \"{}\"",
                endpoint.word(),
                credentials.endpoint().word(),
                endpoint.word()
            )));
        }
        let authorization = match (endpoint, given(names.authz.as_str())) {
            (TlsEndpoint::Client, _) | (_, None) => None,
            (TlsEndpoint::Server, Some(id)) => match self.0.get(id) {
                Some(Object::Authorization(authorization, _)) => Some(authorization.clone()),
                Some(_) => return Err(wrong_object("tls-authz", id, "no authorization")),
                None => return Err(wrong_object("tls-authz", id, "missing; add it with 'object-add'")),
            },
        };
        if authorization.is_some() && !credentials.verifies_peer() {
            return Err(QmpError::generic(
                "'tls-authz' needs clients' certificates: set 'verify-peer' of the credentials to true",
            ));
        }
        Ok(Some(Tls {
            credentials,
            hostname: given(names.hostname.as_str()).map(str::to_owned),
            authorization,
        }))
    }
}

fn credentials(given: Arguments<'_>) -> Result<TlsCredentials, QmpError> {
    for (name, why) in [
        (
            "priority",
            "Sterna does not use GnuTLS priority strings; it offers TLS 1.3 and 1.2 with AEAD ciphers",
        ),
        (
            "passwordid",
            "Sterna cannot read encrypted keys; store the key decrypted, readable only by the VMM",
        ),
    ] {
        if given.0.contains_key(name) {
            return Err(QmpError::generic(format!("Property '{name}' is not supported: {why}")));
        }
    }
    given.only(&["qom-type", "id", "dir", "endpoint", "verify-peer", "sanity-check"])?;
    if !optional_flag(given, "sanity-check")? {
        return Err(QmpError::generic(
            "Property 'sanity-check' cannot be false: Sterna refuses certificates that no peer would accept",
        ));
    }
    let verify_peer = optional_flag(given, "verify-peer")?;
    let endpoint = match given.string("endpoint")? {
        None | Some("client") => TlsEndpoint::Client,
        Some("server") => TlsEndpoint::Server,
        Some(other) => {
            return Err(QmpError::generic(format!("Parameter 'endpoint' does not accept value '{other}'")));
        }
    };
    let Some(dir) = given.string("dir")? else {
        return Err(QmpError::generic("Missing 'dir' property value: the directory of the PEM files"));
    };
    TlsCredentials::from_directory(Path::new(dir), endpoint, verify_peer)
        .map_err(|error| QmpError::generic(format!("Unable to access credentials {error}")))
}

/// A flag with the default true.
fn optional_flag(given: Arguments<'_>, name: &str) -> Result<bool, QmpError> {
    if given.0.contains_key(name) { given.flag(name) } else { Ok(true) }
}

fn list(given: Arguments<'_>) -> Result<Authorization, QmpError> {
    given.only(&["qom-type", "id", "policy", "rules"])?;
    let otherwise = match given.string("policy")? {
        Some(word) => verdict("policy", word)?,
        None => false,
    };
    let empty = Vec::new();
    let rules = match given.0.get("rules") {
        None => &empty,
        Some(rules) => rules.as_array().ok_or_else(|| QmpError::wrong_type("rules", "array"))?,
    };
    let rule = |(index, value): (usize, &Value)| {
        let name = format!("rules[{index}]");
        let members = value.as_object().ok_or_else(|| QmpError::wrong_type(&name, "object"))?;
        let rule = Arguments(members);
        rule.only(&["match", "policy", "format"])?;
        Ok(AuthorizationRule {
            pattern: rule.required_string("match")?.to_owned(),
            allow: verdict("policy", rule.required_string("policy")?)?,
            is_glob: match rule.string("format")? {
                None | Some("exact") => false,
                Some("glob") => true,
                Some(other) => {
                    return Err(QmpError::generic(format!(
                        "Parameter 'format' does not accept value '{other}'; use exact or glob"
                    )));
                }
            },
        })
    };
    let rules = rules.iter().enumerate().map(rule).collect::<Result<_, QmpError>>()?;
    Ok(Authorization { rules, otherwise })
}

fn verdict(name: &str, word: &str) -> Result<bool, QmpError> {
    match word {
        "allow" => Ok(true),
        "deny" => Ok(false),
        _ => Err(QmpError::generic(format!(
            "Parameter '{name}' does not accept value '{word}'; use allow or deny"
        ))),
    }
}

fn unknown_kind(kind: &str) -> QmpError {
    let why = match kind {
        "tls-creds-psk" => {
            "Sterna's TLS library does not support external pre-shared keys: use tls-creds-x509 on both sides"
                .to_owned()
        }
        "tls-creds-anon" => {
            "Sterna does not support TLS without certificates: use tls-creds-x509, if necessary with verify-peer off"
                .to_owned()
        }
        "authz-list-file" | "authz-pam" => {
            "Sterna knows authz-simple and authz-list; give the rules in an authz-list".to_owned()
        }
        other => {
            format!("invalid object type: {other}; Sterna knows tls-creds-x509, authz-simple and authz-list")
        }
    };
    QmpError::generic(match kind {
        "tls-creds-psk" | "tls-creds-anon" | "authz-list-file" | "authz-pam" => {
            format!("object type '{kind}' is not supported: {why}")
        }
        _ => why,
    })
}

fn wrong_object(parameter: &str, id: &str, what: &str) -> QmpError {
    QmpError::generic(format!("'{parameter}' names the object '{id}', which is {what}"))
}

fn is_id(id: &str) -> bool {
    id.starts_with(|first: char| first.is_ascii_alphabetic())
        && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
}
