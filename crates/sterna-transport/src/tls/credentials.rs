//! One side's files (authorities, certificate, key, revocations), with the names that QEMU uses.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{ClientConfig, Error, InconsistentKeys, RootCertStore, ServerConfig};

use super::credentials_error::CredentialsError;
use super::endpoint::TlsEndpoint;
use super::problem::certificate;
use super::provider::provider;
use super::verify::{self, AnyServer};

/// Paths of the files; `None` for a file that does not exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// Trusted authorities, PEM. `None` is valid only if peers are not verified.
    pub authorities: Option<PathBuf>,
    /// This side's certificate and the intermediate certificates up to the authority, PEM. Optional for a client.
    pub certificate: Option<PathBuf>,
    /// Private key of the certificate, PEM, unencrypted.
    pub key: Option<PathBuf>,
    /// Certificate revocation lists, PEM.
    pub revocations: Option<PathBuf>,
}

impl TlsFiles {
    /// Finds the files in `directory` by QEMU's names.
    ///
    /// The names are `ca-cert.pem`, `ca-crl.pem`, and `server-cert.pem` with `server-key.pem` or `client-cert.pem`
    /// with `client-key.pem`. Files that do not exist are `None`.
    pub fn in_directory(directory: &Path, endpoint: TlsEndpoint) -> TlsFiles {
        let there = |name: &str| {
            let path = directory.join(name);
            // A dangling link, or a directory without search permission, must be an error and not count as absence.
            let is_absent =
                std::fs::symlink_metadata(&path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
            (!is_absent).then_some(path)
        };
        TlsFiles {
            authorities: there("ca-cert.pem"),
            certificate: there(&format!("{}-cert.pem", endpoint.word())),
            key: there(&format!("{}-key.pem", endpoint.word())),
            revocations: there("ca-crl.pem"),
        }
    }
}

/// One side's certificate files, read and checked.
pub struct TlsCredentials {
    pub(super) config: Config,
    origin: String,
    verify_peer: bool,
}

pub(super) enum Config {
    Client(Arc<ClientConfig>),
    Server(Arc<ServerConfig>),
}

impl TlsCredentials {
    /// Reads and checks the files of `directory`, as QEMU's `tls-creds-x509` with `dir` does.
    ///
    /// # Errors
    /// As [`TlsCredentials::load`].
    pub fn from_directory(
        directory: &Path,
        endpoint: TlsEndpoint,
        verify_peer: bool,
    ) -> Result<TlsCredentials, CredentialsError> {
        let origin = directory.display().to_string();
        if !directory.is_dir() {
            return Err(CredentialsError {
                file: origin,
                problem: "the directory does not exist".to_owned(),
            });
        }
        let files = TlsFiles::in_directory(directory, endpoint);
        Self::read(&files, endpoint, verify_peer, origin)
    }

    /// Reads and checks `files`.
    ///
    /// With `verify_peer`, a client verifies the server's certificate and name, and a server requires and verifies
    /// a client's certificate.
    ///
    /// # Errors
    /// [`CredentialsError`] for a file that is missing, unreadable or not valid PEM, and for a key that does not
    /// match the certificate. Also for a certificate that has expired, is for another purpose, or was not issued
    /// by one of the authorities; and without one of the Cargo features `aws-lc-rs` and `ring`.
    pub fn load(
        files: &TlsFiles,
        endpoint: TlsEndpoint,
        verify_peer: bool,
    ) -> Result<TlsCredentials, CredentialsError> {
        Self::read(files, endpoint, verify_peer, origin(files))
    }

    /// As [`TlsCredentials::load`], with the embedder's cryptographic library and ciphers.
    ///
    /// It is used for these credentials alone, and does not become the process's default.
    ///
    /// # Errors
    /// As [`TlsCredentials::load`].
    pub fn load_with_provider(
        files: &TlsFiles,
        endpoint: TlsEndpoint,
        verify_peer: bool,
        provider: Arc<CryptoProvider>,
    ) -> Result<TlsCredentials, CredentialsError> {
        Self::read_with(files, endpoint, verify_peer, origin(files), provider)
    }

    /// As [`TlsCredentials::from_directory`], with a test's ciphers.
    #[cfg(test)]
    pub(super) fn with_ciphers(
        directory: &Path,
        endpoint: TlsEndpoint,
        provider: Arc<CryptoProvider>,
    ) -> Result<TlsCredentials, CredentialsError> {
        let origin = directory.display().to_string();
        Self::read_with(&TlsFiles::in_directory(directory, endpoint), endpoint, true, origin, provider)
    }

    /// The role that the credentials are for.
    pub fn endpoint(&self) -> TlsEndpoint {
        match self.config {
            Config::Client(_) => TlsEndpoint::Client,
            Config::Server(_) => TlsEndpoint::Server,
        }
    }

    /// Whether peers must present a valid certificate.
    pub fn verifies_peer(&self) -> bool {
        self.verify_peer
    }

    fn read(
        files: &TlsFiles,
        endpoint: TlsEndpoint,
        verify_peer: bool,
        origin: String,
    ) -> Result<TlsCredentials, CredentialsError> {
        match provider() {
            Some(provider) => Self::read_with(files, endpoint, verify_peer, origin, provider),
            None => Err(CredentialsError { file: origin, problem: NO_PROVIDER.to_owned() }),
        }
    }

    fn read_with(
        files: &TlsFiles,
        endpoint: TlsEndpoint,
        verify_peer: bool,
        origin: String,
        provider: Arc<CryptoProvider>,
    ) -> Result<TlsCredentials, CredentialsError> {
        let read = Read { endpoint, verify_peer, origin: &origin, provider };
        let config = read.config(files)?;
        Ok(TlsCredentials { config, origin, verify_peer })
    }
}

impl fmt::Debug for TlsCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key is left out, because debug output goes to logs.
        f.debug_struct("TlsCredentials")
            .field("endpoint", &self.endpoint())
            .field("verify_peer", &self.verify_peer)
            .field("origin", &self.origin)
            .finish()
    }
}

/// Why credentials cannot be read without a provider.
const NO_PROVIDER: &str = "this program was built without a cryptographic library for TLS: build the crate sterna with the \
                           Cargo feature \"aws-lc-rs\" or \"ring\", or use TlsCredentials::load_with_provider";

/// The name of credentials that are not a directory's.
fn origin(files: &TlsFiles) -> String {
    let named = files.certificate.as_ref().or(files.authorities.as_ref());
    named.map_or_else(|| "no file".to_owned(), |path| path.display().to_string())
}

/// A certificate with its intermediate certificates, and its key.
type Identity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

struct Read<'a> {
    endpoint: TlsEndpoint,
    verify_peer: bool,
    origin: &'a str,
    provider: Arc<CryptoProvider>,
}

impl Read<'_> {
    fn config(&self, files: &TlsFiles) -> Result<Config, CredentialsError> {
        let roots = self.authorities(files)?;
        let identity = self.identity(files)?;
        if let (Some((chain, _)), false, Some(path)) = (&identity, roots.is_empty(), &files.certificate) {
            verify::own(self.endpoint, chain, &roots, &self.provider)
                .map_err(|error| wrong(path, in_words(&error)))?;
        }
        let revocations = match &files.revocations {
            Some(path) => certificate_lists(path)?,
            None => Vec::new(),
        };
        let built = match self.endpoint {
            TlsEndpoint::Client => self.client(roots, revocations, identity).map(Config::Client),
            TlsEndpoint::Server => match identity {
                Some(identity) => self.server(roots, revocations, identity).map(Config::Server),
                None => return Err(self.missing("server-cert.pem and server-key.pem are")),
            },
        };
        built.map_err(|error| match error {
            Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => CredentialsError {
                file: files.key.as_ref().map_or_else(String::new, |path| path.display().to_string()),
                problem: "the key does not belong to the certificate: install a matching pair".to_owned(),
            },
            error => CredentialsError { file: self.origin.to_owned(), problem: in_words(&error) },
        })
    }

    fn authorities(&self, files: &TlsFiles) -> Result<Arc<RootCertStore>, CredentialsError> {
        let mut roots = RootCertStore::empty();
        match &files.authorities {
            None if self.verify_peer => return Err(self.missing("ca-cert.pem is")),
            None => {}
            Some(path) => {
                for certificate in certificates(path)? {
                    roots.add(certificate).map_err(|error| wrong(path, in_words(&error)))?;
                }
            }
        }
        Ok(Arc::new(roots))
    }

    fn identity(&self, files: &TlsFiles) -> Result<Option<Identity>, CredentialsError> {
        match (&files.certificate, &files.key) {
            (None, None) => Ok(None),
            (Some(certificate), Some(key)) => Ok(Some((certificates(certificate)?, private_key(key)?))),
            (Some(path), None) | (None, Some(path)) => Err(wrong(
                path,
                "a certificate and its key need each other; the other file is missing".to_owned(),
            )),
        }
    }

    fn client(
        &self,
        roots: Arc<RootCertStore>,
        revocations: Vec<CertificateRevocationListDer<'static>>,
        identity: Option<Identity>,
    ) -> Result<Arc<ClientConfig>, Error> {
        let builder = ClientConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_safe_default_protocol_versions()?;
        let builder = if self.verify_peer {
            let verifier = WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&self.provider))
                .with_crls(revocations)
                .allow_unknown_revocation_status()
                .build()
                .map_err(|error| Error::General(error.to_string()))?;
            builder.with_webpki_verifier(verifier)
        } else {
            let any = Arc::new(AnyServer(Arc::clone(&self.provider)));
            builder.dangerous().with_custom_certificate_verifier(any)
        };
        let mut config = match identity {
            Some((chain, key)) => builder.with_client_auth_cert(chain, key)?,
            None => builder.with_no_client_auth(),
        };
        config.resumption = Resumption::disabled();
        Ok(Arc::new(config))
    }

    fn server(
        &self,
        roots: Arc<RootCertStore>,
        revocations: Vec<CertificateRevocationListDer<'static>>,
        (chain, key): Identity,
    ) -> Result<Arc<ServerConfig>, Error> {
        let builder = ServerConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_safe_default_protocol_versions()?;
        let builder = if self.verify_peer {
            // No authority names are sent. A client with another authority's certificate then sends it and gets an
            // error that names the problem, instead of sending none.
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&self.provider))
                .clear_root_hint_subjects()
                .with_crls(revocations)
                .allow_unknown_revocation_status()
                .build()
                .map_err(|error| Error::General(error.to_string()))?;
            builder.with_client_cert_verifier(verifier)
        } else {
            builder.with_no_client_auth()
        };
        let mut config = builder.with_single_cert(chain, key)?;
        // If the client never reads the ticket, closing the socket would send a reset.
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(Arc::new(config))
    }

    fn missing(&self, what: &str) -> CredentialsError {
        let problem = format!(
            "{what} needed here for the endpoint {:?}{}",
            self.endpoint.word(),
            if self.verify_peer { "" } else { ", verified peers or not" }
        );
        CredentialsError { file: self.origin.to_owned(), problem }
    }
}

fn in_words(error: &Error) -> String {
    match error {
        Error::InvalidCertificate(error) => certificate(error),
        error => error.to_string(),
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, CredentialsError> {
    check_is_file(path)?;
    let found: Result<Vec<_>, pem::Error> =
        CertificateDer::pem_file_iter(path).and_then(|certificates| certificates.collect());
    match found {
        Ok(found) if found.is_empty() => Err(wrong(path, "there is no PEM certificate in it".to_owned())),
        Ok(found) => Ok(found),
        Err(error) => Err(wrong(path, format!("the PEM file cannot be read: {error}"))),
    }
}

fn certificate_lists(path: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, CredentialsError> {
    check_is_file(path)?;
    let found: Result<Vec<_>, pem::Error> =
        CertificateRevocationListDer::pem_file_iter(path).and_then(|lists| lists.collect());
    match found {
        // If it counted as "nothing is revoked", a list in DER or a truncated file would disable revocation.
        Ok(found) if found.is_empty() => Err(wrong(
            path,
            "there is no PEM revocation list (X509 CRL) in it: add one, or remove the file".to_owned(),
        )),
        Ok(found) => Ok(found),
        Err(error) => Err(wrong(path, format!("the PEM file cannot be read: {error}"))),
    }
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, CredentialsError> {
    check_is_file(path)?;
    PrivateKeyDer::from_pem_file(path).map_err(|error| {
        let is_encrypted = std::fs::read_to_string(path).is_ok_and(|text| text.contains("ENCRYPTED"));
        wrong(
            path,
            if is_encrypted {
                "the key is encrypted, which Sterna cannot read: store it decrypted, readable only by the VMM"
                    .to_owned()
            } else {
                format!("the PEM key cannot be read: {error}")
            },
        )
    })
}

/// Refuses a pipe. Reading it would block the caller, often a monitor, until a writer opens it.
fn check_is_file(path: &Path) -> Result<(), CredentialsError> {
    match std::fs::metadata(path) {
        Ok(metadata) if !metadata.is_file() => Err(wrong(path, "it is not a regular file".to_owned())),
        // The later open returns the error of a file that cannot be examined.
        _ => Ok(()),
    }
}

fn wrong(path: &Path, problem: String) -> CredentialsError {
    CredentialsError { file: path.display().to_string(), problem }
}
