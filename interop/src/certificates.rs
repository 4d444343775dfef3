//! Certificates for moves over TLS, made where they are needed. The lab's are made on the host, which has the time and the random bytes.

use std::path::Path;

use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use sterna_transport::{Tls, TlsEndpoint};

use crate::Failure;

/// The name in the destination's certificate.
const HOST: &str = "localhost";

/// Writes new certificates for the host `localhost` under QEMU's names.
///
/// # Errors
/// The file that cannot be written.
pub fn make(directory: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(directory).map_err(said)?;
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

/// TLS settings of one side.
///
/// # Errors
/// The file that is missing or wrong.
pub fn of(directory: &Path, endpoint: TlsEndpoint) -> Result<Tls, Failure> {
    let mut tls = Tls::from_directory(directory, endpoint).map_err(said)?;
    if endpoint == TlsEndpoint::Client {
        tls.hostname = Some(HOST.to_owned());
    }
    Ok(tls)
}

fn said(error: impl std::fmt::Display) -> Failure {
    error.to_string()
}
