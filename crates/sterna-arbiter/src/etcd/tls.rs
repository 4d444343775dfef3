//! Reads and checks the TLS files before the first connection.

use std::path::Path;
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use ureq::tls::{Certificate, ClientCert, PrivateKey, RootCerts, TlsConfig, TlsProvider};

use super::options::TlsOptions;

#[cfg(all(feature = "ring", not(feature = "aws-lc-rs")))]
use rustls::crypto::ring as library;

#[cfg(feature = "aws-lc-rs")]
use rustls::crypto::aws_lc_rs as library;

#[cfg(not(any(feature = "aws-lc-rs", feature = "ring")))]
compile_error!("TLS needs one of the features aws-lc-rs and ring");

/// Builds the TLS configuration. The error names the file that cannot be used, and the reason.
pub(super) fn config(options: &TlsOptions) -> Result<TlsConfig, String> {
    let provider = Arc::new(library::default_provider());
    let authorities = certificates(&options.ca)?;
    let identity = match &options.identity {
        Some((certificate, key)) => Some((certificates(certificate)?, private_key(key)?)),
        None => None,
    };
    let own = identity.as_ref().map(|(chain, (key, _))| (chain.clone(), key.clone_key()));
    check(options, &provider, &authorities, own)?;
    let identity = identity.map(|(chain, (_, key))| {
        let chain: Vec<_> = chain.iter().map(|one| Certificate::from_der(one).to_owned()).collect();
        ClientCert::new_with_certs(&chain, key)
    });
    let roots = authorities.iter().map(|one| Certificate::from_der(one).to_owned());
    Ok(TlsConfig::builder()
        .provider(TlsProvider::Rustls)
        .unversioned_rustls_crypto_provider(provider)
        .root_certs(RootCerts::from(roots))
        .client_cert(identity)
        .build())
}

/// Checks the files now. Otherwise an error or a panic would first occur when a claim is made.
fn check(
    options: &TlsOptions,
    provider: &Arc<CryptoProvider>,
    authorities: &[CertificateDer<'static>],
    own: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
) -> Result<(), String> {
    let mut roots = RootCertStore::empty();
    for authority in authorities {
        roots.add(authority.clone()).map_err(|error| wrong(&options.ca, &error.to_string()))?;
    }
    let builder = ClientConfig::builder_with_provider(Arc::clone(provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots);
    if let (Some((chain, key)), Some((_, file))) = (own, &options.identity) {
        builder.with_client_auth_cert(chain, key).map_err(|error| {
            wrong(file, &format!("it does not match the certificate ({error}): give a matching pair"))
        })?;
    }
    Ok(())
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let bytes = read(file)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    match found {
        Ok(found) if found.is_empty() => Err(wrong(file, "there is no PEM certificate in it")),
        Ok(found) => Ok(found),
        Err(error) => Err(wrong(file, &format!("the PEM file cannot be read: {error}"))),
    }
}

/// Reads the private key twice: once for the check, and once for the connections.
fn private_key(file: &Path) -> Result<(PrivateKeyDer<'static>, PrivateKey<'static>), String> {
    let bytes = zeroize::Zeroizing::new(read(file)?);
    let is_encrypted = bytes.windows(9).any(|window| window == b"ENCRYPTED");
    let failed = |error: String| match is_encrypted {
        true => wrong(file, "the key is encrypted: store it decrypted, readable only by this process"),
        false => wrong(file, &format!("the PEM key cannot be read: {error}")),
    };
    let checked = PrivateKeyDer::from_pem_slice(&bytes).map_err(|error| failed(error.to_string()))?;
    let used = PrivateKey::from_pem(&bytes).map_err(|error| failed(error.to_string()))?;
    Ok((checked, used))
}

fn read(file: &Path) -> Result<Vec<u8>, String> {
    std::fs::read(file).map_err(|error| wrong(file, &error.to_string()))
}

fn wrong(file: &Path, problem: &str) -> String {
    format!("{}: {problem}", file.display())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, KeyPair};

    /// Returns a self-signed certificate and its key.
    fn pair() -> (String, String) {
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new(vec!["localhost".to_owned()]).expect("names");
        (params.self_signed(&key).expect("signed").pem(), key.serialize_pem())
    }

    #[test]
    fn files_that_cannot_be_used_are_named() {
        let directory = tempfile::tempdir().expect("a directory");
        let put = |name: &str, text: &str| {
            let path = directory.path().join(name);
            std::fs::write(&path, text).expect("written");
            path
        };
        let ((certificate, key), (_, other)) = (pair(), pair());
        let good = put("good.pem", &certificate);
        let key = put("key.pem", &key);
        let with = |ca: &Path, identity: Option<(&Path, &Path)>| {
            let identity = identity.map(|(certificate, key)| (certificate.to_owned(), key.to_owned()));
            config(&TlsOptions { ca: ca.to_owned(), identity })
        };

        with(&good, None).expect("usable");
        with(&good, Some((&good, &key))).expect("usable");
        let no_pem = put("no.pem", "hello");
        let broken = put("broken.pem", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
        let others = put("other-key.pem", &other);
        let sealed = put(
            "sealed.pem",
            "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n",
        );
        for (ca, identity, file, what) in [
            (Path::new("/nowhere"), None, "/nowhere", "No such file"),
            (&no_pem, None, "no.pem", "no PEM certificate"),
            (&broken, None, "broken.pem", ""),
            (&good, Some((no_pem.as_path(), key.as_path())), "no.pem", "no PEM certificate"),
            (&good, Some((&good, &no_pem)), "no.pem", "PEM key cannot be read"),
            (&good, Some((&good, &sealed)), "sealed.pem", "encrypted"),
            (&good, Some((&good, &others)), "other-key.pem", "matching pair"),
        ] {
            let error = with(ca, identity).expect_err(file);
            assert!(error.contains(file) && error.contains(what), "{error}");
        }
    }
}
