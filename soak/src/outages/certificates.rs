//! Certificates for cases over TLS. They are made once, for all processes that take part.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use sterna::{Tls, TlsEndpoint};

/// The name in the destination's certificate.
const HOST: &str = "localhost";

static DIRECTORY: OnceLock<Result<tempfile::TempDir, String>> = OnceLock::new();

/// The directory with this process's certificates.
pub(super) fn directory() -> Result<PathBuf, String> {
    let made = DIRECTORY.get_or_init(|| {
        let directory = tempfile::tempdir().map_err(said)?;
        make(directory.path())?;
        Ok(directory)
    });
    made.as_ref().map(|directory| directory.path().to_owned()).map_err(Clone::clone)
}

/// TLS settings of one side.
pub(super) fn of(directory: &Path, endpoint: TlsEndpoint) -> Result<Tls, String> {
    let mut tls = Tls::from_directory(directory, endpoint).map_err(said)?;
    if endpoint == TlsEndpoint::Client {
        tls.hostname = Some(HOST.to_owned());
    }
    Ok(tls)
}

fn make(directory: &Path) -> Result<(), String> {
    let write = |name: &str, text: String| std::fs::write(directory.join(name), text).map_err(said);
    let mut authority = CertificateParams::default();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    let key = KeyPair::generate().map_err(said)?;
    write("ca-cert.pem", authority.self_signed(&key).map_err(said)?.pem())?;
    let issuer = Issuer::new(authority, key);
    for (endpoint, purpose) in [
        (TlsEndpoint::Client, ExtendedKeyUsagePurpose::ClientAuth),
        (TlsEndpoint::Server, ExtendedKeyUsagePurpose::ServerAuth),
    ] {
        let mut wanted = CertificateParams::new([HOST.to_owned()]).map_err(said)?;
        wanted.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        wanted.extended_key_usages = vec![purpose];
        let key = KeyPair::generate().map_err(said)?;
        let certificate = wanted.signed_by(&key, &issuer).map_err(said)?;
        write(&format!("{}-cert.pem", endpoint.word()), certificate.pem())?;
        write(&format!("{}-key.pem", endpoint.word()), key.serialize_pem())?;
    }
    Ok(())
}

fn said(error: impl std::fmt::Display) -> String {
    format!("certificates: {error}")
}
