//! Object storages that speak S3 (AWS, versitygw, Ceph, …) as [`sterna_store::Objects`].
//!
//! [`S3Objects`] is a prefix of a bucket. Reads name the version that was opened, so that an object that is replaced meanwhile
//! is an error and never a mixture. Every request has a time limit, and is repeated with growing, random pauses if the server or
//! the network failed.
//!
//! | module | contains |
//! | --- | --- |
//! | `options` | [`S3Options`]: endpoint, bucket, style of addresses, limits |
//! | `credentials` | [`CredentialsSource`]: environment, file, command |
//! | `client` | signed requests, retries |
//! | `tls` | authorities and the TLS library |
//! | `objects`, `requests`, `blob`, `upload`, `xml` | the storage; reads at random; multipart uploads; lists of uploads |
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod blob;
mod client;
mod credentials;
mod objects;
mod options;
mod requests;
mod tls;
mod upload;
mod xml;

pub use credentials::CredentialsSource;
pub use objects::S3Objects;
pub use options::{S3Options, Style};
