//! The authorities that a server's certificate must have, and the TLS library.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use ureq::tls::{Certificate, RootCerts, TlsConfig, TlsProvider};

#[cfg(all(feature = "ring", not(feature = "aws-lc-rs")))]
use rustls::crypto::ring as library;

#[cfg(feature = "aws-lc-rs")]
use rustls::crypto::aws_lc_rs as library;

#[cfg(not(any(feature = "aws-lc-rs", feature = "ring")))]
compile_error!("TLS needs one of the features aws-lc-rs and ring");

/// Files with the authorities of a host: Debian, Red Hat, SUSE, Alpine.
const HOST: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// The TLS configuration. The error names the file that cannot be used.
pub(crate) fn config(ca: Option<&Path>) -> Result<TlsConfig, String> {
    let host = || HOST.iter().map(PathBuf::from).find(|path| path.exists());
    let path = ca
        .map(Path::to_owned)
        .or_else(host)
        .ok_or("this host has no file with authorities for TLS: install ca-certificates, or name a file")?;
    let wrong = |why: &dyn std::fmt::Display| format!("{}: {why}", path.display());
    let bytes = std::fs::read(&path).map_err(|error| wrong(&error))?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let found = found.map_err(|error| wrong(&error))?;
    if found.is_empty() {
        return Err(wrong(&"there is no PEM certificate in it"));
    }
    let roots = found.iter().map(|one| Certificate::from_der(one).to_owned());
    Ok(TlsConfig::builder()
        .provider(TlsProvider::Rustls)
        .unversioned_rustls_crypto_provider(Arc::new(library::default_provider()))
        .root_certs(RootCerts::from(roots))
        .build())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_is_given_to_connections_and_is_not_the_processs_default() {
        let directory = tempfile::tempdir().unwrap();
        let (good, bad) = (directory.path().join("good.pem"), directory.path().join("bad.pem"));
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        std::fs::write(&good, params.self_signed(&key).unwrap().pem()).unwrap();
        std::fs::write(&bad, "no certificate").unwrap();

        assert!(config(Some(&good)).is_ok());
        assert!(config(Some(&bad)).unwrap_err().contains("bad.pem"));
        assert!(rustls::crypto::CryptoProvider::get_default().is_none());
    }
}
