//! Parses the text after `etcd:`: the endpoints and their options.

use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

/// Default prefix of each key.
const PREFIX: &str = "sterna/claims/";
const OPTIONS: &str = "ca=FILE, cert=FILE, key=FILE, user=NAME, password-file=FILE and prefix=TEXT";

/// The endpoints of an etcd and how to authenticate to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EtcdOptions {
    /// `scheme://host:port`, in the order in which the endpoints are asked.
    pub(crate) endpoints: Vec<String>,
    /// Present if the URLs are `https`.
    pub(crate) tls: Option<TlsOptions>,
    /// The user's name, and the file that contains the password.
    pub(crate) user: Option<(String, PathBuf)>,
    /// Prefix of each key.
    pub(crate) prefix: String,
}

/// PEM files for TLS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TlsOptions {
    /// Certificates of the trusted authorities.
    pub(crate) ca: PathBuf,
    /// This side's certificate and its private key.
    pub(crate) identity: Option<(PathBuf, PathBuf)>,
}

#[derive(Debug, Default)]
struct Read<'a> {
    urls: Vec<Url>,
    ca: Option<&'a str>,
    cert: Option<&'a str>,
    key: Option<&'a str>,
    user: Option<&'a str>,
    password_file: Option<&'a str>,
    prefix: Option<&'a str>,
}

#[derive(Debug, PartialEq, Eq)]
struct Url {
    text: String,
    is_https: bool,
    is_loopback: bool,
}

impl EtcdOptions {
    /// Parses and checks the options. The error text says what is wrong.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut read = Read::default();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            read.take(part)?;
        }
        if read.urls.is_empty() {
            return Err("it has no URL: etcd:http://HOST:2379 or etcd:https://HOST:2379,ca=FILE".to_owned());
        }
        let tls = read.tls()?;
        let user = read.user(tls.is_some())?;
        let prefix = read.prefix.unwrap_or(PREFIX).to_owned();
        Ok(Self { endpoints: read.urls.into_iter().map(|url| url.text).collect(), tls, user, prefix })
    }
}

impl<'a> Read<'a> {
    fn take(&mut self, part: &'a str) -> Result<(), String> {
        if part.contains("://") && !part.split("://").next().unwrap_or_default().contains('=') {
            let url = url(part).map_err(|problem| format!("{part:?} is not a URL of etcd: {problem}"))?;
            if self.urls.contains(&url) {
                return Err(format!("{part:?} is given twice"));
            }
            self.urls.push(url);
            return Ok(());
        }
        let Some((name, value)) = part.split_once('=') else {
            return Err(format!("{part:?} is neither a URL (http://HOST:PORT) nor one of {OPTIONS}"));
        };
        let place = match name {
            "ca" => &mut self.ca,
            "cert" => &mut self.cert,
            "key" => &mut self.key,
            "user" => &mut self.user,
            "password-file" => &mut self.password_file,
            "prefix" => &mut self.prefix,
            // The error does not quote this option, because its value may be a password.
            "password" => {
                return Err("a password on a command line is visible to other users: use password-file=FILE"
                    .to_owned());
            }
            _ => return Err(format!("unknown option {name:?}; known are {OPTIONS}")),
        };
        if value.is_empty() || value.contains('\0') {
            return Err(format!("{name}= needs a value"));
        }
        if place.replace(value).is_some() {
            return Err(format!("{name}= is given twice"));
        }
        Ok(())
    }

    fn tls(&self) -> Result<Option<TlsOptions>, String> {
        let is_https = self.urls[0].is_https;
        if self.urls.iter().any(|url| url.is_https != is_https) {
            return Err("some URLs are http and some https: use one of them for all".to_owned());
        }
        let identity = match (self.cert, self.key) {
            (None, None) => None,
            (Some(cert), Some(key)) => Some((PathBuf::from(cert), PathBuf::from(key))),
            _ => return Err("cert= and key= need each other: give both or none".to_owned()),
        };
        match (is_https, self.ca) {
            (true, None) => Err("https needs ca=FILE, the authorities of etcd's certificates".to_owned()),
            (true, Some(ca)) => Ok(Some(TlsOptions { ca: PathBuf::from(ca), identity })),
            (false, None) if identity.is_none() => Ok(None),
            (false, _) => Err("ca=, cert= and key= have no effect with http: use https".to_owned()),
        }
    }

    fn user(&self, is_https: bool) -> Result<Option<(String, PathBuf)>, String> {
        match (self.user, self.password_file) {
            (None, None) => Ok(None),
            (Some(_), Some(_)) if !is_https && self.urls.iter().any(|url| !url.is_loopback) => {
                Err("http would send the password unprotected to another host: use https".to_owned())
            }
            (Some(user), Some(file)) => Ok(Some((user.to_owned(), PathBuf::from(file)))),
            _ => Err("user= and password-file= need each other: give both or none".to_owned()),
        }
    }
}

fn url(text: &str) -> Result<Url, &'static str> {
    let (scheme, rest) = text.split_once("://").unwrap_or_default();
    let is_https = match scheme {
        "http" => false,
        "https" => true,
        _ => return Err("it must begin with http:// or https://"),
    };
    if rest.contains('@') {
        return Err("it must not contain a user and password: use user=NAME and password-file=FILE");
    }
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    if rest.contains(['/', '?', '#']) {
        return Err("it must end after the port");
    }
    let (host, port) = rest
        .rsplit_once(':')
        .filter(|(_, port)| !port.ends_with(']'))
        .ok_or("it has no port; etcd's is 2379")?;
    let has_digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    if !has_digits || port.parse::<u16>().unwrap_or(0) == 0 {
        return Err("its port is not a number from 1 to 65535");
    }
    let is_loopback = match host.strip_prefix('[') {
        Some(rest) => {
            let address: Option<Ipv6Addr> = rest.strip_suffix(']').and_then(|address| address.parse().ok());
            address.ok_or("its host is not an IPv6 address in brackets")?.is_loopback()
        }
        None => {
            let is_letter = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
            if host.is_empty() || !host.chars().all(is_letter) {
                return Err("its host is neither a name nor an address");
            }
            host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
        }
    };
    Ok(Url { text: format!("{scheme}://{rest}"), is_https, is_loopback })
}

/// Reads the password from the first line of a file.
pub(super) fn password(file: &Path) -> Result<Zeroizing<String>, String> {
    let text = std::fs::read_to_string(file).map(Zeroizing::new);
    let text = text.map_err(|error| format!("cannot read the password from {}: {error}", file.display()))?;
    match text.lines().next() {
        Some(line) if !line.is_empty() => Ok(Zeroizing::new(line.to_owned())),
        _ => Err(format!("{} contains no password: write it into the first line", file.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_options_are_read() {
        let text =
            "https://a:2379,https://[::1]:2380/,ca=/ca,cert=/c,key=/k,user=u,password-file=/p,prefix=x/";

        let options = EtcdOptions::parse(text).expect("options");

        let tls = TlsOptions { ca: "/ca".into(), identity: Some(("/c".into(), "/k".into())) };
        let expected = EtcdOptions {
            endpoints: vec!["https://a:2379".to_owned(), "https://[::1]:2380".to_owned()],
            tls: Some(tls),
            user: Some(("u".to_owned(), "/p".into())),
            prefix: "x/".to_owned(),
        };
        assert_eq!(options, expected);
        let plain = EtcdOptions::parse("http://localhost:1,user=u,password-file=/p").expect("options");
        assert_eq!((plain.tls, plain.prefix.as_str()), (None, PREFIX));
    }

    #[test]
    fn each_mistake_is_named() {
        for (text, what) in [
            ("", "no URL"),
            ("ca=/ca", "no URL"),
            ("localhost:2379", "neither a URL"),
            ("ftp://a:1", "http:// or https://"),
            ("http://a", "no port"),
            ("http://[::1]", "no port"),
            ("http://a:0", "not a number"),
            ("http://a:65536", "not a number"),
            ("http://a:+1", "not a number"),
            ("http://:1", "neither a name nor an address"),
            ("http://a b:1", "neither a name nor an address"),
            ("http://[::x]:1", "IPv6"),
            ("http://a:1/v3", "end after the port"),
            ("http://u:p@a:1", "use user=NAME"),
            ("http://a:1,http://a:1/", "twice"),
            ("http://a:1,https://b:1,ca=/ca", "some https"),
            ("https://a:1", "needs ca="),
            ("http://a:1,ca=/ca", "use https"),
            ("http://a:1,cert=/c,key=/k", "use https"),
            ("https://a:1,ca=/ca,cert=/c", "need each other"),
            ("https://a:1,ca=/ca,user=u", "need each other"),
            ("http://a:1,user=u,password-file=/p", "unprotected"),
            ("http://a:1,password=secret", "password-file"),
            ("http://a:1,colour=red", "unknown option \"colour\""),
            ("http://a:1,prefix=", "needs a value"),
            ("http://a:1,prefix=a,prefix=b", "twice"),
        ] {
            let error = EtcdOptions::parse(text).expect_err(text);
            assert!(error.contains(what), "{text:?}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn password_is_the_first_line() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        assert!(password(file.path()).expect_err("empty").contains("no password"));
        std::fs::write(file.path(), "a b\nc\n").expect("written");

        assert_eq!(password(file.path()).as_deref().map(String::as_str), Ok("a b"));
        assert!(password(Path::new("/nowhere")).expect_err("missing").contains("/nowhere"));
    }
}
