//! Object storages that speak S3 (AWS, versitygw, Ceph, …) as [`sterna_store::Objects`].
//!
//! [`S3Objects`] is a prefix of a bucket. Reads name the version that was opened, so that an object that is replaced meanwhile
//! is an error and never a mixture. Every request has a time limit, and is repeated with growing, random pauses if the server or
//! the network failed.
//!
//! | module | contains |
//! | --- | --- |
//! | `storages` | [`S3Storages`]: opens `s3://BUCKET/PREFIX`, with a cache |
//! | `options` | [`S3Options`]: endpoint, bucket, style of addresses, limits |
//! | `credentials` | [`CredentialsSource`]: environment, file, command |
//! | `client` | signed requests, retries |
//! | `tls` | authorities and the TLS library |
//! | `objects`, `requests`, `blob`, `upload`, `listing`, `xml` | the storage; reads at random; multipart uploads; lists |
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod blob;
mod client;
mod credentials;
#[doc(hidden)]
pub mod internals;
mod listing;
mod objects;
mod options;
mod requests;
mod storages;
mod tls;
mod upload;
mod xml;

pub use credentials::CredentialsSource;
pub use objects::S3Objects;
pub use options::{S3Options, Style};
pub use storages::S3Storages;
