// Browsers start no worker for a page that was opened from a file. The worker of the search then runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const scope = frame.contentWindow
      scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
      scope.importScripts = (...urls) => Promise.all(urls.map(each => load(scope, each)))
      this.scope = load(scope, url).then(() => scope)
    }

    postMessage(data) {
      this.scope.then(scope => scope.dispatchEvent(new scope.MessageEvent("message", {data})))
    }
  }

  function load(scope, url) {
    return new Promise((resolve, reject) => {
      const script = scope.document.createElement("script")
      script.src = url
      script.onload = resolve
      script.onerror = reject
      scope.document.body.append(script)
    })
  }
}
