//! Failures of TLS as text for an operator: problem, responsible side and remedy.

use rustls::pki_types::ServerName;
use rustls::{AlertDescription, CertificateError, Error};

use super::fault::TlsFault;

/// Reason why a channel has no TLS session, or lost it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TlsProblem {
    /// The peer started without TLS.
    #[error(
        "the peer does not use TLS and this side requires it: set TLS credentials on the other side too, \
         or on neither"
    )]
    PlainPeer,
    /// The peer closed the connection before the handshake was complete.
    #[error(
        "the peer closed during the TLS handshake: it has no TLS credentials, or it refused this side; its log \
         contains the reason"
    )]
    Closed,
    /// The peer broke the connection after the handshake, before its first byte.
    #[error(
        "the peer closed the connection after the TLS handshake without an alert: it refused this side's certificate \
         (a QEMU checks it only then), or did not need the connection; its log contains the reason"
    )]
    Dismissed,
    /// The peer's certificate is invalid.
    #[error("the peer's certificate is refused: {0}")]
    TheirCertificate(String),
    /// The client sent no certificate although one is required.
    #[error(
        "the peer sent no certificate and this side verifies peers: give the other side client-cert.pem and \
         client-key.pem and make it load its credentials again, or load this side's credentials with verify-peer false"
    )]
    NoCertificate,
    /// The peer refused this side's certificate.
    #[error("the peer refused this side's certificate: {0}")]
    OurCertificate(String),
    /// The client's certificate is valid, but its name is not allowed.
    #[error(
        "the peer {name:?} is not on the list of allowed names here: allow it, or migrate from a host whose \
         certificate is allowed"
    )]
    NotAuthorised {
        /// The certificate's distinguished name.
        name: String,
    },
    /// The name to expect in the server's certificate is missing or invalid.
    #[error("{0}")]
    Name(String),
    /// The credentials are for the other role.
    #[error(
        "these TLS credentials are for the endpoint {theirs:?}, but this side is the {wanted}: use the other credentials"
    )]
    Endpoint {
        /// Role that the credentials are for.
        theirs: &'static str,
        /// Role of this side.
        wanted: &'static str,
    },
    /// The two TLS libraries have no common version or cipher.
    #[error(
        "no common TLS version or cipher: {0}; the two sides must share TLS 1.2 or 1.3 with an AEAD cipher"
    )]
    Incompatible(String),
    /// The session has sealed as many records with one key as the cipher allows.
    #[error(
        "a channel has reached its TLS session's limit: with AES-GCM, TLS 1.2 carries at most 256 GiB per \
         channel; enable TLS 1.3 on the peer, or use more channels"
    )]
    Exhausted,
    /// This side could send only part of a record, so no further record can follow.
    #[error("a record was sent only partly: {0}; the channel cannot be used any more")]
    Torn(String),
    /// A record could not be decrypted, or the peer broke a rule of TLS.
    #[error("TLS failed: {0}; a device between the two sides changes the bytes, or the peer is faulty")]
    Broken(String),
}

impl TlsProblem {
    /// The side that must change something to remove the problem.
    pub fn fault(&self) -> TlsFault {
        match self {
            TlsProblem::PlainPeer
            | TlsProblem::TheirCertificate(_)
            | TlsProblem::NoCertificate
            | TlsProblem::OurCertificate(_)
            | TlsProblem::NotAuthorised { .. }
            | TlsProblem::Exhausted
            | TlsProblem::Incompatible(_) => TlsFault::Setup,
            TlsProblem::Name(_) | TlsProblem::Endpoint { .. } => TlsFault::Ours,
            TlsProblem::Broken(_) => TlsFault::Peer,
            TlsProblem::Closed | TlsProblem::Dismissed | TlsProblem::Torn(_) => TlsFault::Nobody,
        }
    }

    pub(super) fn from_rustls(error: Error) -> TlsProblem {
        match error {
            Error::NoCertificatesPresented => TlsProblem::NoCertificate,
            Error::InvalidCertificate(error) => TlsProblem::TheirCertificate(certificate(&error)),
            Error::AlertReceived(alert) => from_alert(alert),
            // In a session this means that the key's limit is reached, because records are never too long.
            Error::EncryptError => TlsProblem::Exhausted,
            Error::PeerIncompatible(what) => TlsProblem::Incompatible(format!("{what:?}")),
            other => TlsProblem::Broken(other.to_string()),
        }
    }
}

/// Converts an alert of the peer.
fn from_alert(alert: AlertDescription) -> TlsProblem {
    use AlertDescription as Alert;
    let because = match alert {
        Alert::CertificateRequired | Alert::NoCertificate => {
            "it requires one and this side has none: put client-cert.pem and client-key.pem into the directory of \
             this side's TLS credentials, then load the credentials again"
        }
        Alert::UnknownCA => {
            "its issuer is not among the authorities that the peer trusts: both sides need the same ca-cert.pem"
        }
        Alert::CertificateExpired => {
            "it has expired or is not valid yet: renew it, and compare the two hosts' clocks"
        }
        Alert::CertificateRevoked => "it is revoked",
        Alert::DecryptError => {
            "a signature does not match: most likely the peer's ca-cert.pem has another authority of the same name"
        }
        Alert::AccessDenied => "it is known, but not on the peer's list of allowed names",
        Alert::BadCertificate | Alert::CertificateUnknown | Alert::UnsupportedCertificate => {
            "the peer's log contains the reason (the name, the purpose, or the signature)"
        }
        // Before any certificate was checked, these alerts mean that there is no common version or cipher.
        Alert::HandshakeFailure | Alert::ProtocolVersion | Alert::InsufficientSecurity => {
            return TlsProblem::Incompatible(format!("the peer sent the alert {alert:?}"));
        }
        other => {
            return TlsProblem::Broken(format!("the peer ended the connection with the alert {other:?}"));
        }
    };
    TlsProblem::OurCertificate(because.to_owned())
}

/// Describes the problem of a certificate and its remedy.
pub(super) fn certificate(error: &CertificateError) -> String {
    use CertificateError as Wrong;
    match error {
        Wrong::Expired => "it has expired; renew it".to_owned(),
        Wrong::ExpiredContext { time, not_after } => format!(
            "it expired {} days ago; renew it, and check this host's clock",
            time.as_secs().saturating_sub(not_after.as_secs()) / 86_400
        ),
        Wrong::NotValidYet | Wrong::NotValidYetContext { .. } => {
            "it is not valid yet; check both hosts' clocks".to_owned()
        }
        Wrong::Revoked => "it is revoked by ca-crl.pem".to_owned(),
        Wrong::UnknownIssuer => {
            "it was not issued by an authority in ca-cert.pem; both sides need certificates of the same authority"
                .to_owned()
        }
        Wrong::BadSignature => {
            "it was not issued by an authority in ca-cert.pem, although an authority there has its issuer's name; \
             both sides need certificates of the same authority"
                .to_owned()
        }
        Wrong::NotValidForNameContext { expected, presented } => wrong_name(expected, presented),
        Wrong::NotValidForName => {
            "it is for another name; set the expected host name to one of its subjectAltNames".to_owned()
        }
        Wrong::InvalidPurpose | Wrong::InvalidPurposeContext { .. } => {
            "it is not for this use: a server's needs the purpose tls_www_server (openssl: extendedKeyUsage=serverAuth), \
             a client's tls_www_client (clientAuth)"
                .to_owned()
        }
        other => other.to_string(),
    }
}

fn wrong_name(expected: &ServerName<'_>, presented: &[String]) -> String {
    let expected = expected.to_str();
    if presented.is_empty() {
        return format!(
            "it has no subjectAltName, and a common name alone is not accepted: issue it again with the \
             alternative name {expected:?} (certtool's template: dns_name or ip_address)"
        );
    }
    let names: Vec<&str> = presented.iter().map(|name| plain_name(name)).collect();
    format!(
        "it is for {}, not for {expected:?}: set the expected host name to that, or connect by that name",
        names.join(", ")
    )
}

/// The name in rustls's debug spelling, such as `DnsName("host")`.
fn plain_name(presented: &str) -> &str {
    presented.split_once('"').and_then(|(_, rest)| rest.split_once('"')).map_or(presented, |(name, _)| name)
}
