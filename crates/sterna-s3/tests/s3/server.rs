//! A server that speaks enough of S3, over plain HTTP on loopback.

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rusty_s3::{Method, signing};
use sterna_s3::{CredentialsSource, S3Objects, S3Options};

pub const BUCKET: &str = "bucket";
pub const KEY: &str = "access";
pub const SECRET: &str = "secret";

/// What the server does wrong with the next request that has a body to send or a status to return.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    Status(u16),
    /// Closes after half of the body.
    CloseEarly,
    /// Closes without an answer, after the request was performed.
    LoseAnswer,
    /// Sends a range that begins one byte later.
    WrongRange,
    /// Ignores the range.
    WholeObject,
    /// Announces more bytes than it sends, and waits.
    LieAboutLength,
    /// Sends nothing.
    Hang,
    /// A byte of the request's body changed on its way.
    ChangedBody,
}

#[derive(Default)]
pub struct State {
    pub objects: BTreeMap<String, Vec<u8>>,
    pub uploads: BTreeMap<String, PartialObject>,
    pub faults: VecDeque<Fault>,
    pub requests: usize,
    /// So many completions of uploads are performed, and their answers are lost.
    pub lost_completions: usize,
    /// Each answer comes this much later.
    pub delay: Duration,
    next: u32,
}

/// An upload in parts.
pub struct PartialObject {
    pub key: String,
    pub parts: BTreeMap<u32, Vec<u8>>,
}

pub struct Server {
    pub state: Arc<Mutex<State>>,
    port: u16,
}

struct Request {
    method: String,
    path: String,
    query: Vec<(String, String)>,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Server {
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(Mutex::new(State::default()));
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (Ok(stream), state) = (stream, Arc::clone(&shared)) else { return };
                std::thread::spawn(move || converse(stream, &state, port));
            }
        });
        Self { state, port }
    }

    pub fn options(&self, secret: &str) -> S3Options {
        let json = format!(r#"printf '{{"AccessKeyId":"{KEY}","SecretAccessKey":"{secret}"}}'"#);
        S3Options {
            credentials: CredentialsSource::Command(json),
            pause: Duration::from_millis(1),
            attempts: 4,
            part_bytes: 5000,
            ..S3Options::new(&self.endpoint(), BUCKET, "pre/fix")
        }
    }

    pub fn objects(&self) -> S3Objects {
        S3Objects::new(self.options(SECRET)).unwrap()
    }

    /// The address of the server.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub fn fail(&self, faults: &[Fault]) {
        self.state.lock().unwrap().faults.extend(faults);
    }

    pub fn requests(&self) -> usize {
        self.state.lock().unwrap().requests
    }
}

fn converse(stream: TcpStream, state: &Mutex<State>, port: u16) {
    // Otherwise the body of an answer waits for the acknowledgement of its head.
    stream.set_nodelay(true).unwrap();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    while let Some(mut request) = read(&mut reader) {
        let is_signed = is_signed(&request, port);
        let delay = state.lock().unwrap().delay;
        std::thread::sleep(delay);
        let (reply, fault) = {
            let mut state = state.lock().unwrap();
            state.requests += 1;
            let is_completion =
                request.method == "POST" && request.query.iter().any(|(name, _)| name == "uploadId");
            let fault = match is_completion && state.lost_completions > 0 {
                true => {
                    state.lost_completions -= 1;
                    Some(Fault::LoseAnswer)
                }
                false => state.faults.pop_front(),
            };
            let reply = match fault {
                Some(Fault::Status(status)) => refusal(status, "Asked"),
                _ if !is_signed => refusal(403, "SignatureDoesNotMatch"),
                _ if !has_bucket(&request) => refusal(404, "NoSuchBucket"),
                _ if !is_intact(&mut request, fault) => refusal(400, "BadDigest"),
                _ => answer(&mut state, &request, fault),
            };
            (reply, fault)
        };
        if !send(&stream, &request, reply, fault) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
            return;
        }
    }
}

fn read(reader: &mut BufReader<TcpStream>) -> Option<Request> {
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|count| *count > 0)?;
    let mut words = line.split_whitespace();
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let query = query.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decoded(name), decoded(value))
    });
    let (path, query) = (path.to_owned(), query.collect());
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.insert(name.to_lowercase(), value.trim().to_owned());
    }
    let length = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some(Request { method, path, query, headers, body })
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, more @ ..] = rest {
        rest = more;
        if *first == b'%' {
            bytes.push(u8::from_str_radix(std::str::from_utf8(&more[..2]).unwrap(), 16).unwrap());
            rest = &more[2..];
        } else {
            bytes.push(*first);
        }
    }
    String::from_utf8(bytes).unwrap()
}

/// Signs the request again with the server's secret, and compares.
fn is_signed(request: &Request, port: u16) -> bool {
    let of = |name: &str| request.query.iter().find(|(key, _)| key == name).map_or("", |(_, value)| value);
    let method = match request.method.as_str() {
        "GET" => Method::Get,
        "HEAD" => Method::Head,
        "PUT" => Method::Put,
        "POST" => Method::Post,
        _ => Method::Delete,
    };
    let date = of("X-Amz-Date");
    let Ok(date) = jiff::fmt::strtime::parse("%Y%m%dT%H%M%SZ", date).and_then(|it| it.to_datetime()) else {
        return false;
    };
    let date = date.to_zoned(jiff::tz::TimeZone::UTC).unwrap().timestamp();
    let url = format!("http://127.0.0.1:{port}{}", request.path).parse().unwrap();
    let query = request.query.iter().filter(|(name, _)| !name.starts_with("X-Amz-"));
    let signed: Vec<&str> = of("X-Amz-SignedHeaders").split(';').filter(|name| *name != "host").collect();
    let headers = signed.iter().map(|name| (*name, request.headers.get(*name).map_or("", String::as_str)));
    let again = signing::sign(
        &date,
        method,
        url,
        KEY,
        SECRET,
        None,
        "us-east-1",
        of("X-Amz-Expires").parse().unwrap_or(0),
        query.map(|(name, value)| (name.as_str(), value.as_str())),
        headers,
    );
    again.query_pairs().any(|(name, value)| name == "X-Amz-Signature" && value == of("X-Amz-Signature"))
}

fn has_bucket(request: &Request) -> bool {
    request.path.trim_start_matches('/').split('/').next() == Some(BUCKET)
}

/// Whether the body has the checksum of the request's header. Parts of an upload need one, because its beginning names the kind.
fn is_intact(request: &mut Request, fault: Option<Fault>) -> bool {
    if fault == Some(Fault::ChangedBody)
        && let Some(byte) = request.body.first_mut()
    {
        *byte ^= 1;
    }
    let is_part = request.method == "PUT" && request.query.iter().any(|(name, _)| name == "uploadId");
    match request.headers.get("x-amz-checksum-crc32") {
        Some(sum) => *sum == checksum(&request.body),
        None => !is_part,
    }
}

fn checksum(bytes: &[u8]) -> String {
    STANDARD.encode(crc32fast::hash(bytes).to_be_bytes())
}

fn refusal(status: u16, code: &str) -> Reply {
    Reply { status, headers: Vec::new(), body: format!("<Error><Code>{code}</Code></Error>").into_bytes() }
}

fn tag(bytes: &[u8]) -> String {
    format!("\"{:08x}-{}\"", crc32fast::hash(bytes), bytes.len())
}

fn answer(state: &mut State, request: &Request, fault: Option<Fault>) -> Reply {
    let of = |name: &str| request.query.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
    let header = |name: &str| request.headers.get(name).map(String::as_str);
    let key = decoded(request.path.trim_start_matches(&format!("/{BUCKET}")).trim_start_matches('/'));
    let ok = |body: Vec<u8>| Reply { status: 200, headers: Vec::new(), body };
    let tagged = |tag: String| Reply { status: 200, headers: vec![("ETag".into(), tag)], body: Vec::new() };
    let holds = |state: &State| match (header("if-none-match"), header("if-match")) {
        (Some(_), _) => !state.objects.contains_key(&key),
        (_, Some(wanted)) => state.objects.get(&key).is_some_and(|bytes| tag(bytes) == wanted),
        _ => true,
    };
    match (request.method.as_str(), of("uploads"), of("uploadId")) {
        ("POST", Some(_), _) => {
            if header("x-amz-checksum-algorithm") != Some("CRC32") {
                return refusal(400, "InvalidRequest");
            }
            state.next += 1;
            let id = format!("id{}", state.next);
            state.uploads.insert(id.clone(), PartialObject { key: key.clone(), parts: BTreeMap::new() });
            let ns = r#"xmlns="http://s3.amazonaws.com/doc/2006-03-01/""#;
            let names = format!("<Bucket>{BUCKET}</Bucket><Key>{key}</Key><UploadId>{id}</UploadId>");
            ok(format!("<InitiateMultipartUploadResult {ns}>{names}</InitiateMultipartUploadResult>")
                .into_bytes())
        }
        ("GET", Some(_), _) => {
            let list = state.uploads.iter().map(|(id, PartialObject { key, .. })| {
                format!("<Upload><Key>{key}</Key><UploadId>{id}</UploadId><Initiated>2020-01-01T00:00:00Z</Initiated></Upload>")
            });
            ok(format!("<R>{}<IsTruncated>false</IsTruncated></R>", list.collect::<String>()).into_bytes())
        }
        ("DELETE", _, Some(id)) => match state.uploads.remove(id) {
            Some(_) => Reply { status: 204, headers: Vec::new(), body: Vec::new() },
            None => refusal(404, "NoSuchUpload"),
        },
        ("PUT", _, Some(id)) => match state.uploads.get_mut(id) {
            Some(upload) => {
                upload.parts.insert(of("partNumber").unwrap().parse().unwrap(), request.body.clone());
                tagged(tag(&request.body))
            }
            None => refusal(404, "NoSuchUpload"),
        },
        ("POST", _, Some(id)) => {
            // A server may look at the condition first.
            if !holds(state) {
                return refusal(412, "PreconditionFailed");
            }
            if !state.uploads.contains_key(id) {
                return refusal(404, "NoSuchUpload");
            }
            let parts = &state.uploads[id].parts;
            let text = String::from_utf8_lossy(&request.body);
            let is_listed = |bytes: &Vec<u8>| {
                text.contains(&format!("<ChecksumCRC32>{}</ChecksumCRC32>", checksum(bytes)))
                    && text.contains(&tag(bytes))
            };
            if text.matches("<PartNumber>").count() != parts.len() || !parts.values().all(is_listed) {
                return refusal(400, "InvalidPart");
            }
            let PartialObject { parts, .. } = state.uploads.remove(id).unwrap();
            let whole: Vec<u8> = parts.into_values().flatten().collect();
            let tag = tag(&whole).replace('"', "&quot;");
            state.objects.insert(key, whole);
            ok(format!("<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>")
                .into_bytes())
        }
        ("GET", _, Some(id)) if state.uploads.contains_key(id) => {
            ok(b"<ListPartsResult></ListPartsResult>".to_vec())
        }
        ("GET", _, Some(_)) => refusal(404, "NoSuchUpload"),
        ("PUT", ..) if !holds(state) => refusal(412, "PreconditionFailed"),
        ("PUT", ..) => {
            state.objects.insert(key, request.body.clone());
            tagged(tag(&request.body))
        }
        ("DELETE", ..) => {
            state.objects.remove(&key);
            Reply { status: 204, headers: Vec::new(), body: Vec::new() }
        }
        _ if key.is_empty() => list(state, of("prefix").unwrap_or(""), of("continuation-token")),
        _ => read_object(state, &key, header("range"), header("if-match"), fault),
    }
}

/// Two keys per page, so that lists have several.
fn list(state: &State, prefix: &str, after: Option<&str>) -> Reply {
    let keys: Vec<_> = state.objects.iter().filter(|(key, _)| key.starts_with(prefix)).collect();
    let rest: Vec<_> =
        keys.into_iter().filter(|(key, _)| after.is_none_or(|after| key.as_str() > after)).collect();
    let shown = &rest[..rest.len().min(2)];
    let contents = shown.iter().map(|(key, bytes)| {
        let (tag, size) = (tag(bytes).replace('"', "&quot;"), bytes.len());
        format!("<Contents><Key>{key}</Key><LastModified>2026-01-02T03:04:05.000Z</LastModified><ETag>{tag}</ETag><Size>{size}</Size></Contents>")
    });
    let next = if rest.len() > 2 {
        format!("<NextContinuationToken>{}</NextContinuationToken>", shown[1].0)
    } else {
        String::new()
    };
    let ns = r#"xmlns="http://s3.amazonaws.com/doc/2006-03-01/""#;
    let text = format!("<ListBucketResult {ns}>{}{next}</ListBucketResult>", contents.collect::<String>());
    Reply { status: 200, headers: Vec::new(), body: text.into_bytes() }
}

fn read_object(
    state: &State,
    key: &str,
    range: Option<&str>,
    matches: Option<&str>,
    fault: Option<Fault>,
) -> Reply {
    let Some(bytes) = state.objects.get(key) else { return refusal(404, "NoSuchKey") };
    if matches.is_some_and(|wanted| wanted != tag(bytes)) {
        return refusal(412, "PreconditionFailed");
    }
    let mut headers = vec![("ETag".to_owned(), tag(bytes))];
    let range = range.filter(|_| fault != Some(Fault::WholeObject));
    let Some((from, to)) = range.and_then(|range| range.strip_prefix("bytes=")?.split_once('-')) else {
        return Reply { status: 200, headers, body: bytes.clone() };
    };
    let shift = usize::from(fault == Some(Fault::WrongRange));
    let (from, to): (usize, usize) = (from.parse::<usize>().unwrap() + shift, to.parse().unwrap());
    if to >= bytes.len() {
        return refusal(416, "InvalidRange");
    }
    headers.push(("Content-Range".to_owned(), format!("bytes {from}-{to}/{}", bytes.len())));
    Reply { status: 206, headers, body: bytes[from..=to].to_vec() }
}

/// Sends the answer. Returns whether the connection stays.
fn send(mut stream: &TcpStream, request: &Request, reply: Reply, fault: Option<Fault>) -> bool {
    match fault {
        Some(Fault::LoseAnswer) => return false,
        Some(Fault::Hang) => {
            std::thread::sleep(Duration::from_secs(3));
            return false;
        }
        _ => {}
    }
    let lie = if fault == Some(Fault::LieAboutLength) { 100 } else { 0 };
    let mut head = format!("HTTP/1.1 {} S\r\nContent-Length: {}\r\n", reply.status, reply.body.len() + lie);
    for (name, value) in &reply.headers {
        head += &format!("{name}: {value}\r\n");
    }
    let body = match fault {
        _ if request.method == "HEAD" => &[][..],
        Some(Fault::CloseEarly) => &reply.body[..reply.body.len() / 2],
        _ => &reply.body[..],
    };
    let sent = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(b"\r\n"));
    let sent = sent.and_then(|()| stream.write_all(body));
    sent.is_ok() && !matches!(fault, Some(Fault::CloseEarly | Fault::LieAboutLength))
}
