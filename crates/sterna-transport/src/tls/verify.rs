//! Verification of certificates: this side's own when they are loaded, the peer's in the handshake.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

use super::endpoint::TlsEndpoint;

/// Checks whether a peer with the same authorities would accept this side's certificate.
///
/// The check runs when the files are loaded, so that a bad certificate is found before a migration starts.
pub(super) fn own(
    endpoint: TlsEndpoint,
    chain: &[CertificateDer<'static>],
    roots: &Arc<RootCertStore>,
    provider: &Arc<CryptoProvider>,
) -> Result<(), Error> {
    let (leaf, issuers) = chain.split_first().ok_or(Error::NoCertificatesPresented)?;
    let now = UnixTime::now();
    match endpoint {
        TlsEndpoint::Server => {
            let parsed = ParsedCertificate::try_from(leaf)?;
            let algorithms = provider.signature_verification_algorithms.all;
            verify_server_cert_signed_by_trust_anchor(&parsed, roots, issuers, now, algorithms)
        }
        TlsEndpoint::Client => {
            let verifier =
                WebPkiClientVerifier::builder_with_provider(Arc::clone(roots), Arc::clone(provider))
                    .build()
                    .map_err(|error| Error::General(error.to_string()))?;
            verifier.verify_client_cert(leaf, issuers, now).map(drop)
        }
    }
}

/// Verifier of a client without `verify-peer`. It accepts any server that has its certificate's key.
#[derive(Debug)]
pub(super) struct AnyServer(pub Arc<CryptoProvider>);

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _leaf: &CertificateDer<'_>,
        _issuers: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, leaf, signed, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, leaf, signed, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
