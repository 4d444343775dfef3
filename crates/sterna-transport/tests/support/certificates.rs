//! Certificates for tests, generated in each run.

use std::path::Path;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, DnValue,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams,
    SerialNumber, date_time_ymd,
};

/// A certificate authority of a test.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
    /// Intermediate certificates between the issued ones and the trusted authority, PEM.
    chain: String,
}

/// Properties of a certificate to issue.
pub(crate) struct Wanted<'a> {
    /// Common name of the subject.
    pub name: &'a str,
    /// Host names and IP addresses for subjectAltName.
    pub hosts: &'a [&'a str],
    pub is_server: bool,
    pub is_expired: bool,
    /// Use RSA keys, as in QEMU's manual, instead of ECDSA.
    pub is_rsa: bool,
    pub serial: u64,
}

impl Default for Wanted<'_> {
    fn default() -> Self {
        Wanted {
            name: "host",
            hosts: &["localhost", "127.0.0.1"],
            is_server: true,
            is_expired: false,
            is_rsa: false,
            serial: 7,
        }
    }
}

impl Authority {
    pub(crate) fn new(name: &str) -> Authority {
        Self::with_key(name, KeyPair::generate().expect("a key"))
    }

    /// An authority with an RSA key.
    #[allow(dead_code)]
    pub(crate) fn rsa(name: &str) -> Authority {
        Self::with_key(name, stored_key(include_str!("rsa-authority.pem")))
    }

    fn with_key(name: &str, key: KeyPair) -> Authority {
        let params = authority_params(name);
        let pem = params.self_signed(&key).expect("signed").pem();
        Authority { issuer: Issuer::new(params, key), pem, chain: String::new() }
    }

    /// An intermediate authority that this one has issued.
    #[allow(dead_code)]
    pub(crate) fn intermediate(&self, name: &str, serial: u64) -> Authority {
        let key = KeyPair::generate().expect("a key");
        let mut params = authority_params(name);
        params.serial_number = Some(SerialNumber::from(serial));
        let pem = params.signed_by(&key, &self.issuer).expect("signed").pem();
        let chain = format!("{pem}{}", self.chain);
        Authority { issuer: Issuer::new(params, key), pem, chain }
    }

    /// Writes the authority to `ca-cert.pem`.
    pub(crate) fn write(&self, directory: &Path) {
        std::fs::write(directory.join("ca-cert.pem"), &self.pem).expect("written");
    }

    /// Issues a certificate, and writes it and its key with QEMU's names.
    pub(crate) fn issue(&self, directory: &Path, wanted: &Wanted<'_>) {
        let hosts: Vec<String> = wanted.hosts.iter().map(|host| (*host).to_owned()).collect();
        let mut params = CertificateParams::new(hosts).expect("names");
        // GnuTLS prints a country in any other encoding as hexadecimal digits.
        let country = DnValue::PrintableString("GB".try_into().expect("printable"));
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CountryName, country);
        params.distinguished_name.push(DnType::OrganizationName, "Example");
        params.distinguished_name.push(DnType::CommonName, wanted.name);
        params.serial_number = Some(SerialNumber::from(wanted.serial));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        let (purpose, word) = if wanted.is_server {
            (ExtendedKeyUsagePurpose::ServerAuth, "server")
        } else {
            (ExtendedKeyUsagePurpose::ClientAuth, "client")
        };
        params.extended_key_usages = vec![purpose];
        params.not_before = date_time_ymd(2020, 1, 1);
        params.not_after =
            if wanted.is_expired { date_time_ymd(2021, 1, 1) } else { date_time_ymd(2090, 1, 1) };
        let key = match wanted.is_rsa {
            true => stored_key(include_str!("rsa-end.pem")),
            false => KeyPair::generate().expect("a key"),
        };
        let certificate = params.signed_by(&key, &self.issuer).expect("signed");
        std::fs::write(directory.join(format!("{word}-cert.pem")), certificate.pem() + &self.chain)
            .expect("written");
        std::fs::write(directory.join(format!("{word}-key.pem")), key.serialize_pem()).expect("written");
    }

    /// Writes `ca-crl.pem`, which revokes one serial number.
    #[allow(dead_code)]
    pub(crate) fn revoke(&self, directory: &Path, serial: u64) {
        let revoked = RevokedCertParams {
            serial_number: SerialNumber::from(serial),
            revocation_time: date_time_ymd(2022, 1, 1),
            reason_code: None,
            invalidity_date: None,
        };
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2022, 1, 1),
            next_update: date_time_ymd(2090, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: vec![revoked],
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let pem = list.signed_by(&self.issuer).expect("signed").pem().expect("encoded");
        std::fs::write(directory.join("ca-crl.pem"), pem).expect("written");
    }
}

fn authority_params(name: &str) -> CertificateParams {
    let mut params = CertificateParams::new(Vec::new()).expect("no names");
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

/// RSA keys are stored, because ring makes none. They protect nothing.
fn stored_key(pem: &str) -> KeyPair {
    KeyPair::from_pem(pem).expect("a key")
}

/// A directory with an authority and a good certificate for each end.
#[allow(dead_code)]
pub(crate) fn good_directory() -> tempfile::TempDir {
    directory_of("Test authority")
}

/// As [`good_directory`], with the authority's name `authority`.
#[allow(dead_code)]
pub(crate) fn directory_of(authority: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    let authority = Authority::new(authority);
    authority.write(directory.path());
    authority.issue(directory.path(), &Wanted { name: "server", ..Wanted::default() });
    authority.issue(directory.path(), &Wanted { name: "client", is_server: false, ..Wanted::default() });
    directory
}
