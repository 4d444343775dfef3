//! An etcd inside the test process, and servers that misbehave.

use std::collections::HashMap;
use std::io::{Read, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::{Value, json};

/// A request that the server received.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) path: String,
    /// The value of the header `authorization`.
    pub(crate) token: Option<String>,
    pub(crate) body: Value,
}

/// The reaction of a server to a request.
#[derive(Debug, Clone)]
pub(crate) enum Reply {
    /// Sends a status and a body.
    Http(u16, String),
    /// Sends these bytes and closes the connection.
    Bytes(Vec<u8>),
    /// Closes the connection without an answer.
    Close,
    /// Sends nothing until the server ends.
    Hang,
    /// Sends one byte of a header at a time, without end.
    Drip,
}

/// A server on loopback that ends when it is dropped.
pub(crate) struct Server {
    address: SocketAddr,
    ends: Arc<AtomicBool>,
    requests: Arc<Mutex<Vec<Request>>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts a server that answers each request with the result of `reply`.
    pub(crate) fn start(reply: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
        let address = listener.local_addr().expect("an address");
        let (ends, requests) = (Arc::<AtomicBool>::default(), Arc::<Mutex<Vec<Request>>>::default());
        let (ended, seen) = (Arc::clone(&ends), Arc::clone(&requests));
        let thread = std::thread::spawn(move || {
            std::thread::scope(|scope| {
                for stream in listener.incoming() {
                    if ended.load(Ordering::Acquire) {
                        return;
                    }
                    let Ok(stream) = stream else { continue };
                    let (reply, seen, ended) = (&reply, &seen, &ended);
                    scope.spawn(move || {
                        let Some(request) = read(&stream) else { return };
                        seen.lock().expect("no panic").push(request.clone());
                        answer(stream, &reply(&request), ended);
                    });
                }
            });
        });
        Self { address, ends, requests, thread: Some(thread) }
    }

    /// Returns the URL `http://HOST:PORT` of the server.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns the requests that were received so far.
    pub(crate) fn requests(&self) -> Vec<Request> {
        self.requests.lock().expect("no panic").clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Release);
        // The thread waits in `accept`, so a connection wakes it.
        let _ = TcpStream::connect(self.address);
        let _ = self.thread.take().expect("running").join();
    }
}

fn read(mut stream: &TcpStream) -> Option<Request> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).ok()?;
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).ok()?;
    let header = |name: &str| {
        let fields = head.lines().filter_map(|line| line.split_once(": "));
        fields.filter(|(field, _)| field.eq_ignore_ascii_case(name)).map(|(_, value)| value.to_owned()).next()
    };
    let mut body = vec![0; header("content-length")?.parse().ok()?];
    stream.read_exact(&mut body).ok()?;
    let path = head.split(' ').nth(1)?.to_owned();
    Some(Request { path, token: header("authorization"), body: serde_json::from_slice(&body).ok()? })
}

/// Sends the reply. The client may have closed the connection, so errors are ignored.
fn answer(mut stream: TcpStream, reply: &Reply, ended: &AtomicBool) {
    let wait = || std::thread::sleep(Duration::from_millis(5));
    match reply {
        Reply::Http(status, body) => {
            let length = body.len();
            let _ = write!(stream, "HTTP/1.1 {status} X\r\nContent-Length: {length}\r\n\r\n{body}");
        }
        Reply::Bytes(bytes) => drop(stream.write_all(bytes)),
        Reply::Close => {}
        Reply::Hang => {
            while !ended.load(Ordering::Acquire) {
                wait();
            }
        }
        Reply::Drip => {
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nX: ");
            while !ended.load(Ordering::Acquire) && stream.write_all(b"a").is_ok() {
                wait();
            }
        }
    }
}

/// The keys and values of a fake etcd.
#[derive(Debug, Clone, Default)]
pub(crate) struct Store(Arc<Mutex<HashMap<String, String>>>);

impl Store {
    /// Answers a transaction like etcd.
    pub(crate) fn txn(&self, body: &Value) -> String {
        let mut keys = self.0.lock().expect("no panic");
        let key = body["compare"][0]["key"].as_str().expect("a key");
        assert_eq!(body["compare"][0]["target"], "CREATE");
        let answer = match keys.get(key) {
            None => {
                let put = &body["success"][0]["requestPut"];
                assert_eq!(put["key"], key);
                keys.insert(key.to_owned(), put["value"].as_str().expect("a value").to_owned());
                json!({"header": {"cluster_id": "7"}, "succeeded": true, "responses": [{"response_put": {}}]})
            }
            Some(value) => json!({
                "header": {"cluster_id": "7"},
                "responses": [{"response_range": {"kvs": [{"key": key, "value": value}], "count": "1"}}],
            }),
        };
        answer.to_string()
    }

    pub(crate) fn delete(&self, body: &Value) -> String {
        self.0.lock().expect("no panic").remove(body["key"].as_str().expect("a key"));
        json!({"header": {"cluster_id": "7"}, "deleted": "1"}).to_string()
    }
}
